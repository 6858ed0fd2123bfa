"""Mistral against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.mistral import Mistral
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

KINDS: dict[str, dict[str, Any]] = {"a window of 4 tokens": {"sliding_window": 4}, "no window": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses and gradients equal transformers'."""
    assert_equal_to_transformers(small(Mistral, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_logits_of_the_whole_text(kind: str) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(small(Mistral, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(small(Mistral, **KINDS[kind]), tmp_path)


@pytest.mark.parametrize(
    ("given", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 8}, 8)]
)
def test_a_null_window_is_none_and_a_missing_one_the_default(
    given: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    """As in transformers: version 0.2 of the model has null, and 0.1 had 4096."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = {"model_type": "mistral", "vocab_size": 29, "num_key_value_heads": 2, **sizes, **given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(Mistral, tmp_path).window_of(0) == window
