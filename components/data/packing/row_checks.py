"""Checks for packed rows: text lengths, and equality with the rows at the run's beginning."""

import logging
from collections.abc import Mapping
from typing import Any

from drawloom import UserError
from drawloom.ports import LanguageModel, TokenDocuments

log = logging.getLogger("drawloom.data")


def warn_of_long_texts(longest_text: int, models: Mapping[str, LanguageModel]) -> None:
    """Warn if the longest text, in tokens, exceeds a model's positions."""
    for name, model in models.items():
        longest = model.max_sequence_length
        if longest is not None and longest_text > longest:
            log.warning(
                "the longest text of a row has %d tokens, and the positions of [%s] are made for %d "
                "(max_position_embeddings, and rope_scaling if there is one): the model has learned no later "
                "positions; write a length of at most %d, or a config.json with rope_scaling",
                *(longest_text, name, longest, longest),
            )


def warn_of_cut_documents(split_name: str, documents: TokenDocuments, length: int) -> None:
    """Warn if documents with token weights, such as conversations, are longer than a row."""
    cut = int((documents.lengths > length).sum())
    if cut and documents.read(0, 0, 1).weights is not None:
        log.warning(
            "%s: %d of %d documents with weights are longer than a row of %d tokens, and are cut: what follows has "
            "no prompt; the longest has %d tokens",
            *(split_name, cut, len(documents.lengths), length, documents.lengths.max()),
        )


def check_rows_are_unchanged(saved: Mapping[str, Any], current: Mapping[str, Any], *, accept_changes: bool) -> None:
    """
    Compare row counts and digests (`rows`, `sha256`), by split or by split and source, with a checkpoint's.

    Raises UserError for a difference, or logs it if changes are accepted. Raises KeyError if the state is not a
    dataset's.
    """
    if not saved.keys() & current.keys():
        raise KeyError(f"the state has {', '.join(saved)}, but no split in this dataset")
    differences = ", and ".join(
        filter(None, (_describe_row_change(name, saved, current) for name in {**saved, **current}))
    )
    if differences and not accept_changes:
        raise UserError(
            f"the corpus is not the one that this run began with: {differences}; restore the old one, "
            "use another run name, or add --accept-changes",
            exit_code=2,
        )
    if differences:
        log.warning("the corpus is not the one that this run began with: %s", differences)


def _describe_row_change(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe how rows differ from the rows at the run's beginning; empty if they are equal."""
    if name not in saved or name not in current:
        return f"{name} is {'new' if name in current else 'missing'}"
    before, after = saved[name], current[name]
    if before["rows"] != after["rows"]:
        return f"{name} had {before['rows']} rows, and has {after['rows']}"
    return f"{name} had other tokens in its {before['rows']} rows" if before != after else ""
