"""Gemma 3 for text against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.gemma3 import Gemma3
from drawloom.graph import UserError
from support.families import (
    assert_all_projections_are_adapted,
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    small,
)

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "defaults": {"query_pre_attn_scalar": 8},
    "windows and full attention": {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 4,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 50.0,
    },
    "scaled positions of full attention, biases, an own head": {
        "layer_types": [FULL, SLIDING],
        "sliding_window": 5,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "attention_bias": True,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 21,
        "rms_norm_eps": 1e-3,
    },
}


def gemma(kind: str) -> Gemma3:
    changes = dict(KINDS[kind])
    if scaling := changes.get("rope_scaling"):
        changes["rope_scaling"] = RopeScaling(**scaling)
    return small(Gemma3, **changes)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, packed documents' losses and gradients equal transformers'."""
    assert_equal_to_transformers(gemma(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(gemma(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token equals the whole text."""
    assert_generated_as_whole_texts(gemma(kind))


def test_operations_equal_the_count_of_torch() -> None:
    """FLOPs of matrix products and attention equal torch's count."""
    assert_operations_equal_the_count_of_torch(gemma("windows and full attention"))


def test_lora_adapts_all_projections() -> None:
    """LoRA finds the layers by their names in transformers."""
    assert_all_projections_are_adapted(gemma("defaults"))


def write(folder: Path, **changes: Any) -> Path:
    config = small(Gemma3).hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


def test_an_older_config_has_its_layer_types_from_a_pattern(tmp_path: Path) -> None:
    """Configs from transformers 4 have sliding_window_pattern and rope_local_base_freq instead of tables."""
    old = {"layer_types": "-", "rope_parameters": "-", "sliding_window_pattern": 2}
    config = read_config(Gemma3, write(tmp_path, rope_theta=300.0, rope_local_base_freq=20.0, **old))
    assert [config.window_of(layer) for layer in (0, 1)] == [4096, None]
    ropes = [config.rope_of(layer) for layer in (0, 1)]
    assert [rope.base for rope in ropes if rope] == [20.0, 300.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"final_logit_softcapping": 30.0}, "says final_logit_softcapping = 30.0"),
        ({"hidden_activation": "silu"}, "says hidden_activation"),
        ({"layer_types": [FULL]}, "layer_types has 1 types, and num_hidden_layers = 2"),
        (
            {"layer_types": [FULL, "linear_attention"]},
            'layer_types: expected "full_attention" or "sliding_attention", got the string "linear_attention"',
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}, FULL: {"rope_theta": 1e4}}},
            "scales rotary positions of sliding attention",
        ),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(Gemma3, write(tmp_path, **changes))
