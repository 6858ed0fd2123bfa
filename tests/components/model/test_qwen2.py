"""Qwen2.5 against transformers."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.qwen2 import Qwen2
from support.families import assert_equal_to_transformers, assert_files_go_both_ways, small

KINDS: dict[str, dict[str, Any]] = {
    "Qwen2.5": {"tie_word_embeddings": True},
    "a window in the last layer": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_transformers(kind: str) -> None:
    """Logits, losses and gradients."""
    assert_equal_to_transformers(small(Qwen2, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """In both directions."""
    assert_files_go_both_ways(small(Qwen2, **KINDS[kind]), tmp_path)


def test_windows_are_of_the_last_layers_if_they_are_used() -> None:
    """A window that is written down and not used is none."""
    model = small(Qwen2, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert [model.architecture.window_of(layer) for layer in (0, 1)] == [None, 4]
    assert small(Qwen2, sliding_window=4, max_window_layers=1).architecture.window_of(1) is None
