"""Qwen3.5 for text, dense and with experts, and Qwen3-Next against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.model.qwen3_5_moe import Qwen35Moe
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.graph import UserError
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

FULL, LINEAR = "full_attention", "linear_attention"
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [LINEAR, FULL],
}
FLAGS: dict[str, Any] = DELTA | {
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": [FULL, LINEAR],
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    "router_aux_loss_coef": 0.0,
    "linear_key_head_dim": 8,
}
SPARSE: dict[str, Any] = {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4}
KINDS: dict[str, tuple[type[DecoderBuilder], dict[str, Any]]] = {
    "qwen3_5": (Qwen35, DELTA),
    "qwen3_5, every flag": (Qwen35, FLAGS),
    "qwen3_5_moe": (Qwen35Moe, DELTA | EXPERTS),
    "qwen3_5_moe, every flag": (Qwen35Moe, FLAGS | EXPERTS),
    "qwen3_next": (Qwen3Next, DELTA | EXPERTS),
    "qwen3_next, every flag": (
        Qwen3Next,
        FLAGS | EXPERTS | SPARSE | {"mlp_only_layers": [3], "layer_types": [FULL, LINEAR] * 2},
    ),
}


def qwen(kind: str, **changes: Any) -> DecoderBuilder:
    family, settings = KINDS[kind]
    return small(family, **settings | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits and gradients equal those of transformers, and packed documents' losses those of each document alone."""
    # With 19 tokens the float32 logits of both sides are 1.7e-5 from ours in float64, beyond the bound of 1e-5.
    assert_equal_to_transformers(qwen(kind), length=13)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, in which queries, keys and values are joined."""
    assert_files_go_both_ways(qwen(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token, with states of convolutions and the delta rule, equals the whole text."""
    assert_generated_as_whole_texts(qwen(kind))


COUNTS = {"qwen3_5": 3 * 24 * 40, "qwen3_5_moe": 24 * 5 + 2 * 3 * 24 * 12 + 3 * 24 * 14 + 24}
"""Products by token in a feed-forward network; with experts in the router, two experts, a shared one and its gate."""


@pytest.mark.parametrize("kind", COUNTS)
def test_operations_equal_a_count_by_hand(kind: str) -> None:
    """
    Each weight is multiplied by every token that it sees; a state costs three products for its head, a token and pass.
    """
    flops, keys, values = qwen(kind).forward_flops(), 2 * (8 if "moe" in kind else 6), 4 * 10
    projected = 2 * keys + values
    linear = 24 * (projected + values + 4 + 4) + projected * 4 + values * 24  # with gates, b and a, and 4 taps
    full = 24 * (2 * 32 + 16 + 16) + 32 * 24  # queries with gates, keys and values of two heads
    assert sum(flops.by_parameter.values()) == 2 * (linear + full + 2 * COUNTS[kind] + 24 * 29)
    assert flops.per_pair == {None: 2 * 2 * 4 * 8}
    assert flops.per_token == 3 * 2 * 4 * (keys // 2) * 10
    assert flops.count_training_flops(7, {None: 0}) == 3 * 7 * (sum(flops.by_parameter.values()) + flops.per_token)


def write(folder: Path, **changes: Any) -> Path:
    config = qwen("qwen3_5").hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


def test_positions_of_images_do_not_change_text(tmp_path: Path) -> None:
    """Published configs have mrope_section, and an interval instead of layer types."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config: Any = read_config(Qwen35, write(tmp_path, rope_parameters=rope, layer_types="-", full_attention_interval=2))
    assert config.layer_types == [LINEAR, FULL]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not divisible by linear_num_key_heads = 2"),
        ({"layer_types": [FULL]}, "layer_types has 1 types"),
        ({"hidden_act": "gelu"}, "says hidden_act"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(Qwen35, write(tmp_path, **changes))
