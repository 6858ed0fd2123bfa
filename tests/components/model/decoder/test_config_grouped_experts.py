"""GLM-4.5, DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.auto import AutoModel
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.deepseek_v2 import DeepseekV2
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.glm4_moe import Glm4Moe
from drawloom.components.model.glm4_moe_lite import Glm4MoeLite
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.model.qwen3_5_moe import Qwen35Moe
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.weights.load import persistent_tensors
from drawloom.graph import UserError
from support.adapted import OneStage
from support.families import (
    assert_all_projections_are_adapted,
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    small,
)
from support.qwen3 import SPARSE_SIZES, cpu_kernels, twin, whole

SIZES = SPARSE_SIZES | {"num_experts": 8, "first_k_dense_replace": 1, "num_hidden_layers": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "kv_lora_rank": 9,
    "q_lora_rank": 11,
}
EVEN = {"kv_lora_rank": 10, "router_aux_loss_coef": 0.0}  # transformers views pairs of latents as complex numbers
GROUPS: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
}
HYBRID = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
YARN = RopeScaling(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=1.3, beta_fast=8.0
)
KINDS: dict[str, tuple[type[DecoderBuilder], dict[str, Any]]] = {
    "glm4_moe": (Glm4Moe, {}),
    "glm4_moe, every flag": (
        Glm4Moe,
        GROUPS | {"partial_rotary_factor": 0.75, "use_qk_norm": True, "attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek_v3": (DeepseekV3, LATENT),
    "deepseek_v3, every flag": (
        DeepseekV3,
        LATENT | GROUPS | {"rope_interleave": False, "attention_bias": True, "rope_scaling": YARN},
    ),
    "moonlight": (DeepseekV3, LATENT | {"q_lora_rank": 0, "first_k_dense_replace": 0}),
    "deepseek_v2": (
        DeepseekV2,
        LATENT | EVEN | {"q_lora_rank": 0, "n_shared_experts": 1},
    ),
    "deepseek_v2, every flag": (
        DeepseekV2,
        LATENT
        | EVEN
        | {key: value for key, value in GROUPS.items() if key != "norm_topk_prob"}
        | {"attention_bias": True, "mlp_bias": True, "rope_scaling": YARN},
    ),
    "glm4_moe_lite": (Glm4MoeLite, LATENT | {"rope_scaling": YARN, "tie_word_embeddings": True}),
}


def model_of(kind: str) -> DecoderBuilder:
    family, changes = KINDS[kind]
    return small(family, **SIZES | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, packed documents' losses and gradients equal transformers'."""
    assert_equal_to_transformers(model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(model_of(kind), tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "flag" in kind])
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token equals the whole text, operations are counted, and LoRA finds all projections."""
    model = model_of(kind)
    assert_generated_as_whole_texts(model)
    # Three choices, gate and up of 12 channels each, and down, over 22 tokens.
    assert_operations_equal_the_count_of_torch(model, 22 * 3 * 2 * 3 * 24 * 12)
    assert_all_projections_are_adapted(model)


ROUTED: dict[type[DecoderBuilder], dict[str, Any]] = {
    **dict.fromkeys((Dots1, Glm4Moe), SIZES),
    **dict.fromkeys((DeepseekV2, DeepseekV3, Glm4MoeLite), SIZES | {"kv_lora_rank": 10, "num_key_value_heads": 4}),
    **dict.fromkeys((Qwen3Next, Qwen35Moe), SPARSE_SIZES | HYBRID),
    Qwen3Moe: SPARSE_SIZES,
    GptOss: {key: size for key, size in SPARSE_SIZES.items() if key != "moe_intermediate_size"},
}


@pytest.mark.parametrize("family", ROUTED)
def test_routers_choose_like_transformers_in_bfloat16(family: type[DecoderBuilder]) -> None:
    """Logits of DeepSeek's routers are products in float32: rounded to bfloat16, other experts would be chosen."""
    torch.manual_seed(0)
    model = small(family, **ROUTED[family] | {"num_experts": 64, "num_experts_per_tok": 8, "hidden_size": 64})
    module = whole(model)
    name = "model.layers.1.mlp." + ("router" if family is GptOss else "gate")
    theirs: Any = twin(model, persistent_tensors(module)).get_submodule(name)
    router: Any = module.get_submodule(name)
    for layer in (router, theirs):  # DeepSeek's bias stays in float32
        for parameter in layer.parameters():
            parameter.data = parameter.data.bfloat16()
    hidden = torch.randn(1, 200, 64, dtype=torch.bfloat16)
    chosen, weights = (result.flatten(0, 1).sort(-1).values for result in router(hidden))
    _, wanted_weights, wanted = theirs(hidden.flatten(0, 1))
    assert torch.equal(chosen, wanted.sort(-1).values)
    # Qwen rounds the weights to bfloat16.
    torch.testing.assert_close(weights.to(wanted_weights.dtype), wanted_weights.sort(-1).values)


def test_tensors_of_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    """Published folders have up to 16 layers more than the model: they predict later tokens and are ignored."""
    model = model_of("deepseek_v3")
    write_hugging_face_folder(tmp_path / "base", model, OneStage(whole(model)))
    path = tmp_path / "base" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.enorm.weight": torch.ones(24)}, path)
    AutoModel(kernels=cpu_kernels(), path=tmp_path / "base").check_before_open()
    save_file(load_file(path) | {"model.layers.18.enorm.weight": torch.ones(24)}, path)
    with pytest.raises(UserError, match="unexpected"):
        AutoModel(kernels=cpu_kernels(), path=tmp_path / "base").check_before_open()


def write(folder: Path, kind: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(model_of(kind).hugging_face_config() | changes))
    return folder


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """A config with Kimi K2's model_type is read as DeepSeek V3."""
    read = read_config(DeepseekV3, write(tmp_path, "deepseek_v3", model_type="kimi_k2"))
    assert read == model_of("deepseek_v3").architecture


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4 rotates 3 channels of head_dim = 8"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2, and latent attention has"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "says topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "says moe_layer_freq = 2"),
        ("deepseek_v2", {"norm_topk_prob": True}, "says norm_topk_prob = true"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "only dense layers before sparse ones"),
    ],
)
def test_other_configs_are_refused(kind: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """If the model would only resemble the config, the config is refused, and the error names the key."""
    with pytest.raises(UserError, match=text):
        read_config(KINDS[kind][0], write(tmp_path, kind, **changes))
