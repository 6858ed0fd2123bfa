"""Qwen2.5 against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.qwen2 import Qwen2
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

KINDS: dict[str, dict[str, Any]] = {
    "Qwen2.5": {"tie_word_embeddings": True},
    "a window in the last layer": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses and gradients equal transformers'."""
    assert_equal_to_transformers(small(Qwen2, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_logits_of_the_whole_text(kind: str) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(small(Qwen2, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(small(Qwen2, **KINDS[kind]), tmp_path)


def test_only_the_last_layers_have_windows_if_enabled() -> None:
    """A window without `use_sliding_window` has no effect."""
    model = small(Qwen2, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert [model.architecture.window_of(layer) for layer in (0, 1)] == [None, 4]
    assert small(Qwen2, sliding_window=4, max_window_layers=1).architecture.window_of(1) is None


def test_a_null_window_is_none_even_if_enabled(tmp_path: Path) -> None:
    """As in transformers; a missing window is 4096 tokens."""
    from transformers import AutoConfig  # takes seconds

    config = small(Qwen2, use_sliding_window=True, max_window_layers=1).hugging_face_config()
    for given, window in ({}, 4096), ({"sliding_window": None}, None):
        config = {key: value for key, value in config.items() if key != "sliding_window"} | given
        (tmp_path / "config.json").write_text(json.dumps(config))
        wanted = "full_attention" if window is None else "sliding_attention"
        assert AutoConfig.from_pretrained(tmp_path).layer_types == ["full_attention", wanted]
        actual = read_config(Qwen2, tmp_path)
        assert [actual.window_of(layer) for layer in (0, 1)] == [None, window]
