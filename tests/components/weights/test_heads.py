"""Heads of a sequence classifier's folder, as it is the base of another run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drawloom.components.loss.reward import ScoringLoss
from drawloom.components.ports.model import Model
from drawloom.components.ports.pipeline import SCORE, Scorer
from drawloom.components.stages.checks import check_initial_folder
from drawloom.components.weights.adapted import HEAD
from drawloom.components.weights.heads import find_score_head_rows, read_score_head
from drawloom.graph import UserError
from drawloom.graph.testing import fake


def folder_of(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """Write a folder with a head for three classes of four channels, and a config."""
    path.mkdir()
    save_file(tensors or {SCORE: torch.arange(12.0).view(3, 4)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


NAMES = {"0": "bad", "1": "good", "2": "none"}


@pytest.mark.parametrize(
    ("labels", "outputs", "rows"),
    [
        (NAMES, ["bad", "good", "none"], [0, 1, 2]),
        (NAMES, ["none", "bad", "good"], [2, 0, 1]),
        (None, ["a", "b", "c"], [0, 1, 2]),
        ({str(n): f"LABEL_{n}" for n in range(3)}, ["a", "b", "c"], [0, 1, 2]),
        (NAMES, ["bad", "good", "neutral"], "bad, good, none, and the loss has bad, good, neutral"),
        (NAMES, ["bad", "good"], "has 3 outputs in score.weight, and the loss has 2 outputs"),
    ],
)
def test_rows_follow_the_names_of_labels(labels: Any, outputs: list[str], rows: Any, tmp_path: Path) -> None:
    """An output has the weights of the class with its name; other names are refused, and numbers are no names."""
    folder = folder_of(tmp_path / "base", id2label=labels)
    if isinstance(rows, str):
        with pytest.raises(UserError, match=rows):
            find_score_head_rows(folder, outputs)
        return
    assert read_score_head(folder, outputs, 4)[:, 0].tolist() == [4.0 * row for row in rows]
    with pytest.raises(UserError, match="for 4 channels, and the model has 8"):
        read_score_head(folder, outputs, 8)


@pytest.mark.parametrize(
    ("names", "config", "is_refused"),
    [
        ((SCORE,), {"tie_word_embeddings": False}, True),
        ((SCORE,), {"tie_word_embeddings": True}, False),
        ((SCORE,), {}, False),  # transformers leaves out its default
        ((SCORE, HEAD), {"tie_word_embeddings": False}, False),
        ((HEAD,), {"tie_word_embeddings": False}, False),
    ],
)
def test_a_language_model_needs_a_head(names: Any, config: Any, is_refused: bool, tmp_path: Path) -> None:
    """An untied classifier's folder has no head that a language model's loss could use; a score needs none."""
    folder = folder_of(tmp_path / "base", {name: torch.ones(1, 4) for name in names}, **config)
    score: Any = fake(Scorer)
    model: Any = SimpleNamespace(initial_weights=folder)
    for weights, base in ((folder, fake(Model)), (None, model)):
        check_initial_folder(weights, base, score)
        if is_refused:
            with pytest.raises(UserError, match="a sequence classifier's, without the lm_head"):
                check_initial_folder(weights, base, None)
        else:
            check_initial_folder(weights, base, None)


def test_a_head_that_is_not_used_is_warned_of(tmp_path: Path) -> None:
    """There is a warning exactly if the model's folder has a head with the loss's outputs, and `head` is not set."""
    base = folder_of(tmp_path / "base", id2label=NAMES)
    empty = folder_of(tmp_path / "empty", {HEAD: torch.ones(1, 4)})
    node: Any = SimpleNamespace(nodes={}, warning=lambda key, text, hint: hint)
    for path, head, outputs, is_warned in (
        (base, None, ["none", "bad", "good"], True),
        (base, base, ["none", "bad", "good"], False),
        (base, None, ["other", "bad", "good"], False),
        (empty, None, ["reward"], False),
        (tmp_path / "missing", None, ["reward"], False),
    ):
        node.settings = {"head": head, "labels": outputs}
        node.neighbour = {"model": SimpleNamespace(settings={"path": path, "weights": True})}.get
        hints = [f'write head = "{base}" to train it further'] * is_warned
        warnings: list[Any] = list(ScoringLoss.constraints(node))
        assert warnings == hints
