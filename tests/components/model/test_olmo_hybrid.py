"""OLMo Hybrid against transformers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.olmo_hybrid import OlmoHybrid
from drawloom.graph import UserError
from support.families import assert_equal_to_transformers, assert_generated_as_whole_texts, small

FULL, LINEAR = "full_attention", "linear_attention"
# Queries, keys and values are equally wide, or transformers would save other convolutions than it has loaded.
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [LINEAR, FULL],
}
KINDS: dict[str, dict[str, Any]] = {
    "olmo_hybrid": DELTA,
    "olmo_hybrid, every flag": DELTA
    | {
        "layer_types": [FULL, LINEAR],
        "linear_allow_neg_eigval": False,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
    },
}


def olmo(kind: str) -> DecoderBuilder:
    return small(OlmoHybrid, **KINDS[kind])


def get_published_name(full: int, name: str) -> str:
    """Return a tensor's published name; transformers renames the norm in the full layer, too."""
    return name.replace(f"{full}.feedforward_layer_norm", f"{full}.post_attention_layernorm")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """
    Logits, losses of packed documents and all gradients equal transformers', which loads our export, for each
    document alone.
    """
    full = KINDS[kind]["layer_types"].index(FULL)
    assert_equal_to_transformers(olmo(kind), length=9, by_files=partial(get_published_name, full))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token, with states of convolutions and the delta rule, equals the whole text."""
    assert_generated_as_whole_texts(olmo(kind))


def test_initial_decays_are_drawn_for_times() -> None:
    """Decays have Mamba's initial biases: their softplus is log-uniform from 0.001 to 0.1."""
    bias = torch.empty(1000)
    olmo("olmo_hybrid").initialize_parameter("model.layers.0.linear_attn.dt_bias", bias, 0)
    steps = torch.nn.functional.softplus(bias)
    assert 0.000999 < float(steps.min()) < 0.002 and 0.05 < float(steps.max()) < 0.1001
    assert abs(float(steps.log10().mean()) + 2) < 0.1


def write(folder: Path, **changes: Any) -> Path:
    config = olmo("olmo_hybrid").hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


def test_missing_sizes_follow_from_others(tmp_path: Path) -> None:
    """Published configs may lack sizes of linear layers."""
    missing = dict.fromkeys([key for key in DELTA if key.startswith("linear")], "-")
    config: Any = read_config(OlmoHybrid, write(tmp_path, **missing))
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (4, 4)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (4, 8)


def test_positions_are_refused(tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match="has rotary positions with rope_theta = 500000"):
        read_config(OlmoHybrid, write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
