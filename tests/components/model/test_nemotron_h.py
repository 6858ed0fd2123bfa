"""Nemotron-H and Nemotron 3 against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.nemotron_h import NemotronH
from drawloom.graph import UserError
from support.families import (
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    small,
)

MAMBA, FULL, MOE, MLP = "linear_attention", "full_attention", "moe", "mlp"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, MLP, FULL, MAMBA],
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "num_experts": 4,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 10,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": SIZES,
    "experts, every flag": SIZES
    | {
        "layer_types": [MAMBA, MOE, FULL, MOE],
        "conv_kernel": 3,
        "use_conv_bias": False,
        "time_step_min": 0.7,
        "moe_latent_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-3,
    },
}


def nemotron(kind: str, **changes: Any) -> DecoderBuilder:
    return small(NemotronH, **KINDS[kind] | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Logits, losses of packed documents and all gradients equal transformers', and files go both ways."""
    assert_equal_to_transformers(nemotron(kind), by_files=str)
    assert_files_go_both_ways(nemotron(kind), tmp_path, by_files=True)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token, with states of convolutions and Mamba-2, equals the whole text."""
    assert_generated_as_whole_texts(nemotron(kind))


def test_operations_equal_a_count_by_hand() -> None:
    """Mamba-2's weights are multiplied by every token, and a state costs two products for its head."""
    flops = nemotron("dense").forward_flops()
    mamba = 24 * (2 * 30 + 2 * 2 * 7 + 6) + 4 * (30 + 2 * 2 * 7) + 30 * 24
    attention, mlp = 24 * (32 + 2 * 16) + 32 * 24, 2 * 24 * 40
    assert sum(flops.by_parameter.values()) == 2 * (2 * mamba + attention + mlp + 24 * 29)
    assert (flops.per_pair, flops.per_token) == ({None: 4 * 4 * 8}, 2 * 4 * 6 * 7 * 5)


def test_residual_outputs_are_initialized_by_their_number() -> None:
    """A layer adds one output to the stream, so its matrix is divided by the root of the number of layers."""
    model, sizes = nemotron("dense", hidden_size=64), (64, 30)
    last, first = torch.empty(sizes), torch.empty(30, 64)
    model.initialize_parameter("model.layers.0.mixer.out_proj.weight", last, 0)
    model.initialize_parameter("model.layers.0.mixer.in_proj_z.weight", first, 0)
    assert float(last.std() / first.std()) == pytest.approx(0.5, rel=0.1)


def write(folder: Path, **changes: Any) -> Path:
    config = nemotron("experts, every flag").hugging_face_config() | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))
    return folder


def test_published_configs_are_read(tmp_path: Path) -> None:
    """Published configs have letters or older names of layers, and an infinite time_step_limit."""
    expected = nemotron("experts, every flag").architecture
    limit = {"time_step_limit": [0.0, float("inf")], "num_hidden_layers": "-"}
    letters = write(tmp_path, layers_block_type="-", hybrid_override_pattern="ME*E", **limit)
    assert read_config(NemotronH, letters) == expected
    older = write(tmp_path, layers_block_type=["mamba", "moe", "attention", "moe"], **limit)
    assert read_config(NemotronH, older) == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mlp_hidden_act": "silu"}, "says mlp_hidden_act = "),
        ({"mamba_num_heads": 5}, "mamba_num_heads = 5 is not divisible by n_groups = 2"),
        ({"tie_word_embeddings": True}, "transformers can't read a tied one"),
        ({"layers_block_type": "-", "hybrid_override_pattern": "MX"}, "layer_types"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(NemotronH, write(tmp_path, **changes))
