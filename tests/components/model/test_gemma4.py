"""Gemma 4 for text against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.gemma4 import Gemma4
from drawloom.graph import UserError
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {"layer_types": [SLIDING, FULL], "sliding_window": 5, "global_head_dim": 12},
    "gemma4, every flag": {
        "num_hidden_layers": 3,
        "layer_types": [FULL, SLIDING, FULL],
        "sliding_window": 3,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_local_base_freq": 100.0,
        "rope_theta": 1000.0,
        "final_logit_softcapping": 0.5,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-3,
    },
}


def gemma(kind: str) -> DecoderBuilder:
    return small(Gemma4, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses of packed documents and all gradients equal transformers' for each document alone."""
    assert_equal_to_transformers(gemma(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, of which transformers' have sizes by layer."""
    assert_files_go_both_ways(gemma(kind), tmp_path)


def test_parts_of_a_text_have_its_logits() -> None:
    """Generation token by token, with cached keys of two widths, equals the whole text."""
    assert_generated_as_whole_texts(gemma("gemma4, every flag"))


def test_operations_equal_a_count_by_hand() -> None:
    """Layers with full attention have other heads, and values without a projection of their own."""
    flops = gemma("gemma4, every flag").forward_flops()
    full, sliding = 24 * 4 * 12 * 2 + 24 * 12, 24 * 4 * 8 * 2 + 24 * 2 * 8 * 2
    assert sum(flops.by_parameter.values()) == 2 * (2 * full + sliding + 3 * 3 * 24 * 40 + 24 * 29)
    assert flops.per_pair == {None: 2 * 4 * 4 * 12, 3: 4 * 4 * 8}


def write(folder: Path, **changes: Any) -> Path:
    config = gemma("gemma4").hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size_per_layer_input": "-"}, "says hidden_size_per_layer_input = 256"),
        ({"num_kv_shared_layers": 1}, "says num_kv_shared_layers = 1"),
        ({"enable_moe_block": True}, "says enable_moe_block = true"),
        ({"layer_types": [FULL, SLIDING]}, "the last layer has a window"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rotary positions of type 'yarn'"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(Gemma4.family, write(tmp_path, **changes))
