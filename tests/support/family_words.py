"""Small models for all families, as words for a recipe with sizes for four layers."""

_EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2")
_SPARSE = (*_EXPERTS, "model.moe_intermediate_size=32")
_LATENT = (*_SPARSE, "model.num_key_value_heads=2", "model.kv_lora_rank=10", "model.first_k_dense_replace=1")
_INDEX = ("model.index_topk=8", "model.index_n_heads=2", "model.index_head_dim=64")
_TYPED = 'model.layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]'
_DELTA = (
    *("model.linear_key_head_dim=8", "model.linear_value_head_dim=8", "model.linear_num_key_heads=1"),
    "model.linear_num_value_heads=2",
)
_HYBRID = (*_DELTA, "model.partial_rotary_factor=0.5")
_FAMILIES = {
    "gemma3": (_TYPED, "model.sliding_window=8"),
    "gemma4": (_TYPED, "model.sliding_window=8", "model.global_head_dim=16", "model.attention_k_eq_v=true", *_SPARSE),
    "olmo3": (_TYPED, "model.sliding_window=8"),
    "smollm3": (),
    "lfm2": (),
    "olmo_hybrid": _DELTA,
    "kimi_linear": (*_LATENT, "model.linear_num_heads=2", "model.linear_head_dim=8"),
    "nemotron_h": (
        *_SPARSE,
        *("model.mamba_num_heads=4", "model.mamba_head_dim=8", "model.n_groups=2", "model.ssm_state_size=8"),
        "model.moe_shared_expert_intermediate_size=48",
    ),
    "granite": ("model.residual_multiplier=0.5", "model.embedding_multiplier=2.0"),
    "phi3": ("model.partial_rotary_factor=0.5", "model.sliding_window=8"),
    "gpt_oss": (_TYPED, "model.sliding_window=8", *_EXPERTS),
    "minimax_m2": _EXPERTS,
    "glm4_moe": _SPARSE,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": (*_LATENT, *_INDEX),
    "glm_moe_dsa": (*_LATENT, *_INDEX),
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": (*_HYBRID, *_SPARSE),
    "qwen3_next": (*_HYBRID, *_SPARSE),
}

_SIZES = ("num_hidden_layers=4", "hidden_size=32", "num_attention_heads=2", "num_key_value_heads=1", "head_dim=16")
FAMILY_SIZES = tuple(f"model.{size}" for size in _SIZES)
"""Sizes of all families' small models."""

PEFT_TARGETS = {"nemotron_h": "*.[qkvo]_proj"}
"""Patterns of projections, where PEFT refuses some: Mamba's kernels read the weight of `out_proj` themselves."""

FAMILY_WORDS = {
    family: (f"model.use=model.{family}", "model.intermediate_size=48", *words) for family, words in _FAMILIES.items()
}
"""Words by the name of a family's component."""
