"""Heads in model folders: a language model's, and a sequence classifier's with its output names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drawloom import NodeView, UserError
from drawloom.components.storage.durable_files import read_file
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.weights.adapted import HEAD
from drawloom.ports import SCORE

MAX_CONFIG = 2**20
"""Maximum config size in bytes."""


def find_model_folder(loss: NodeView) -> Path | None:
    """Return a loss's model's folder with initial weights, or None."""
    model = loss.neighbour("model")
    return model.settings.get("path") if model is not None and model.settings.get("weights") else None


def check_language_model_head(folder: Path) -> None:
    """Raise UserError if a readable folder has a sequence classifier's head, and no language model's, tied or not."""
    try:
        names, config = open_safetensors_folder(folder).specs().keys(), _read_config_or_empty(folder)
    except UserError:
        return
    if (
        SCORE in names
        and not any(name.endswith(HEAD) for name in names)
        and not config.get("tie_word_embeddings", True)
    ):
        raise UserError(
            f"{folder} is a sequence classifier's, without the {HEAD} that a language model needs; take the language "
            "model that it comes from, or train it by loss.reward or loss.classification"
        )


def read_score_head(folder: Path, outputs: Sequence[str], width: int) -> Tensor:
    """Return a folder's head, (outputs, width), ordered like `outputs`. Raises UserError if it has another head."""
    order = find_score_head_rows(folder, outputs)
    weight = open_safetensors_folder(folder).tensor(SCORE)
    if weight.shape[1] != width:
        text = f"head: {folder} has {SCORE} for {weight.shape[1]} channels, and the model has {width}"
        raise UserError(f"{text}; name the export of a model of this size, or leave head out", 2)
    return weight[order]


def find_score_head_rows(folder: Path, outputs: Sequence[str]) -> list[int]:
    """
    Return, for every name in `outputs`, its row in the folder's score head; the rows in order if the folder has no
    names, or one output. Raises UserError if the names or their number differ.
    """
    spec = open_safetensors_folder(folder).specs().get(SCORE)
    if spec is None or spec.shape[0] != len(outputs):
        content = "no" if spec is None else f"{spec.shape[0]} outputs in"
        text = f"head: {folder} has {content} {SCORE}, and the loss has {len(outputs)} outputs"
        raise UserError(f"{text}; name the export of such a model, or leave head out", 2)
    names = _read_output_names(folder, len(outputs))
    if names is None or len(outputs) == 1:
        return list(range(len(outputs)))
    if sorted(names) != sorted(outputs):
        text = f"head: {folder} has the outputs {', '.join(names)}, and the loss has {', '.join(outputs)}"
        raise UserError(f"{text}; write the folder's names, or leave head out", 2)
    return [names.index(name) for name in outputs]


def _read_output_names(folder: Path, count: int) -> list[str] | None:
    """Return a classifier's output names; None if it has none, or transformers' numbers."""
    names = _read_config_or_empty(folder).get("id2label")
    if not isinstance(names, Mapping) or {*names} != {str(number) for number in range(count)}:
        return None
    ordered = [str(names[str(number)]) for number in range(count)]
    return None if ordered == [f"LABEL_{number}" for number in range(count)] else ordered


def _read_config_or_empty(folder: Path) -> Mapping[str, Any]:
    """Return a folder's `config.json`, or {} if it is missing or invalid."""
    try:
        config = parse_strict_json(
            read_file(folder / "config.json", MAX_CONFIG), max_values=MAX_CONFIG, infinities=True
        )
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
