"""
Token ids of a model folder, in its `tokenizer.json`: two models share predictions only if their ids mean the same.

Only ids are compared. Other merges or another normalizer divide a text differently, but the ids keep their meaning, and
different releases write equal ones differently.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from drawloom import UserError
from drawloom.ports import Tokenizer

FILE = "tokenizer.json"


@attrs.frozen
class TokenIds:
    """Ids by token, for text and for control tokens such as a document's end."""

    text: Mapping[str, int]
    control: Mapping[str, int]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all tokens and ids."""
        pairs = sorted([*self.text.items(), *self.control.items()])
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def read_token_ids(folder: Path) -> TokenIds | None:
    """Return the ids in a folder's `tokenizer.json`, or None if there is none, or an unreadable one."""
    try:
        content = json.loads((folder / FILE).read_text("utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token for token in content.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ids = vocabulary | {token: entry["id"] for token, entry in added.items()}
    control = {token for token, entry in added.items() if entry.get("special")}
    return TokenIds(
        {token: ids[token] for token in ids if token not in control}, {token: ids[token] for token in control}
    )


def read_tokenizer_ids(tokenizer: Tokenizer) -> TokenIds | None:
    """Return a tokenizer's ids; None if it writes no `tokenizer.json`."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return read_token_ids(Path(folder))


def compare_folder_ids(folder: Path, tokenizer: Tokenizer) -> str | None:
    """
    Compare a model folder's ids with the data's tokenizer's; the folder may have more.

    Returns a warning if there is nothing to compare, or if only control tokens differ, else None. Raises UserError if a
    token of text has another id.
    """
    own, other = read_tokenizer_ids(tokenizer), read_token_ids(folder)
    if own is None or other is None:
        return f"{folder} has no {FILE} to compare with [tokenizer]: its ids must mean the same"
    known = {**other.text, **other.control}
    if different := _describe_other_id(own.text, known):
        text = f"{folder} has another tokenizer than the data: {different}"
        raise UserError(f"{text}; use a model with the data's tokenizer", 2)
    if different := _describe_other_id(own.control, known):
        return f"{folder} has other control tokens than the data: {different}"
    return None


def _describe_other_id(ids: Mapping[str, int], known: Mapping[str, int]) -> str:
    """Describe the first token with another id in `known`; empty if there is none."""
    for token, token_id in ids.items():
        if known.get(token) != token_id:
            there = "has no id" if token not in known else f"is {known[token]}"
            return f"the token {token!a} {there} there, and is {token_id} in [tokenizer]"
    return ""
