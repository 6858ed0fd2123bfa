"""Llama against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.llama import Llama
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

KINDS: dict[str, dict[str, Any]] = {
    "Llama 3": {
        "rope_scaling": RopeScaling(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=16,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        "rope_theta": 50.0,
    },
    "tied, heads of another width": {"tie_word_embeddings": True, "head_dim": 10},
    "with all biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses and gradients equal transformers'."""
    assert_equal_to_transformers(small(Llama, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_logits_of_the_whole_text(kind: str) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(small(Llama, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(small(Llama, **KINDS[kind]), tmp_path)


def test_an_old_config_has_transformers_defaults(tmp_path: Path) -> None:
    """Files older than Llama 3 leave out keys with their default value: head size, rotary base, eps."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 29, **sizes}))
    config = read_config(Llama, tmp_path)
    assert (config.num_key_value_heads, config.head_dim) == (4, 6)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (1e4, 1e-6, False)
