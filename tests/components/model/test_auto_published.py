"""Configs as published, with keys for other libraries, and sizes that give the published parameter counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.model.auto import AutoModel
from support.qwen3 import cpu_kernels

PLAIN: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "use_cache": True}
PHI: dict[str, Any] = PLAIN | {
    "model_type": "phi3",
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"long_factor": [2] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10_000.0,
    "sliding_window": 262_144,
    "tie_word_embeddings": True,
    "vocab_size": 200_064,
}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"}
DEEPSEEK: dict[str, Any] = PLAIN | {
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
    "rope_theta": 10_000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102_400,
}
DELTA = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "num_attention_heads": 16,
}
NEXT: dict[str, Any] = (
    PLAIN
    | DELTA
    | {
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10_000_000,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151_936,
    }
)
QWEN_TEXT: dict[str, Any] = (
    PLAIN
    | DELTA
    | {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        },
        "vocab_size": 248_320,
    }
)
QWEN = {"model_type": "qwen3_5", "text_config": QWEN_TEXT, "tie_word_embeddings": True, "vision_config": {}}
GEMMA_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": GEMMA_TEXT, "vision_config": {}}
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Phi-4-mini": (PHI, 3.84),
    "DeepSeek-V2-Lite": (DEEPSEEK, 15.7),
    "Qwen3-Next-80B-A3B": (NEXT, 79.7),
    "Qwen3.5-4B, text": (QWEN, 4.2),
    "Gemma-3-4B, text": (GEMMA, 3.88),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_kept(name: str, tmp_path: Path) -> None:
    """The parameter count is the published one, and an export only adds a missing class name to the config."""
    config, billions = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModel(kernels=cpu_kernels(), path=tmp_path, weights=False)
    parameters = sum(parameter.numel() for parameter in model.build_on_meta().parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    exported = model.build_updated_folder_config(tmp_path / "config.json")
    assert exported == config | {key: exported[key] for key in ("architectures",) if "vision_config" not in config}
