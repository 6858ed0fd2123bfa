"""Nodes of a small run for reinforcement learning, and its model's logits."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.model import TokenContext
from drawloom.graph.project import Recipe
from support.observers_of_runs import TINY

NEW = 6
END = 256


def open_run(
    folder: Path, nodes: Sequence[str] = ("rollouts", "executor", "tokenizer"), **changes: Any
) -> AbstractContextManager[Any]:
    """Open nodes of a recipe with a small model."""
    values: dict[str, Any] = {
        "vars": {"base": "unused"},
        "run": {"name": "tiny", "folder": str(folder)},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY, "initializer_range": 0.3},
        "rollouts": {"max_tokens": NEW},
    }
    return Recipe.load("grpo").with_values(values | changes).open(nodes)


def logits_of(run: Any, tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    logits: Tensor = run["executor"].infer(tokens, TokenContext(places, torch.zeros_like(tokens)))
    return logits
