"""LFM2 against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.lfm2 import Lfm2
from drawloom.graph import UserError
from support.adapted import adapt, lora
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

FULL, CONV = "full_attention", "conv"
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": [CONV, FULL]},
    "lfm2, every flag": {
        "num_hidden_layers": 4,
        "layer_types": [FULL, CONV, CONV, FULL],
        "conv_L_cache": 4,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-3,
    },
}


def lfm2(kind: str) -> DecoderBuilder:
    return small(Lfm2, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, losses of packed documents and all gradients equal transformers' for each document alone."""
    assert_equal_to_transformers(lfm2(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders, whose tensors have names of their own."""
    assert_files_go_both_ways(lfm2(kind), tmp_path)


def test_layers_are_adapted_by_their_names_in_files() -> None:
    """LoRA's targets are names in files or in the model, and cover one projection of three joined ones, too."""
    adapted = adapt(lfm2("lfm2"), lora("w1", "out_proj", "up_proj", "in_proj_b"))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".lora_")[0].removeprefix("model.layers.") for name in trained} == {
        *(f"{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("gate", "up")),
        *("0.conv.out_proj", "0.conv.in_proj_b", "1.self_attn.o_proj"),
    }


def test_operations_equal_a_count_by_hand() -> None:
    """A convolution layer multiplies four square matrices and its taps by every token."""
    flops = lfm2("lfm2").forward_flops()
    conv, full = 4 * 24 * 24 + 24 * 3, 24 * 32 * 2 + 2 * 24 * 16
    assert sum(flops.by_parameter.values()) == 2 * (conv + full + 2 * 3 * 24 * 40 + 24 * 29)
    assert (flops.per_pair, flops.per_token) == ({None: 4 * 32}, 0)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"block_ff_dim": 100, "block_auto_adjust_ff_dim": True, "block_multiple_of": 32}, {"intermediate_size": 96}),
        ({"full_attn_idxs": [0], "layer_types": None}, {"layer_types": [FULL, CONV]}),
        ({"full_attn_idxs": [], "layer_types": None}, {"layer_types": [CONV, CONV]}),
        ({"full_attn_idxs": None, "layer_types": None}, {"layer_types": [FULL, FULL]}),
        ({"tie_embedding": False}, {"tie_word_embeddings": False}),
    ],
)
def test_older_keys_are_read(changes: dict[str, Any], read: dict[str, Any], tmp_path: Path) -> None:
    """Published configs have keys that transformers 5 replaces."""
    (tmp_path / "config.json").write_text(json.dumps(lfm2("lfm2").hugging_face_config() | changes))
    config = read_config(Lfm2, tmp_path)
    assert {key: getattr(config, key) for key in read} == read


def test_biases_of_convolutions_are_refused(tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    (tmp_path / "config.json").write_text(json.dumps(lfm2("lfm2").hugging_face_config() | {"conv_bias": True}))
    with pytest.raises(UserError, match="says conv_bias = true"):
        read_config(Lfm2, tmp_path)


def test_parts_of_a_text_have_its_logits() -> None:
    """Generation token by token, with the last tokens of convolutions in the cache, equals the whole text."""
    assert_generated_as_whole_texts(lfm2("lfm2, every flag"))
