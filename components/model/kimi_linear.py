"""The component `model.kimi_linear`: Kimi Linear (Kimi team 2025, arXiv 2510.26692)."""

from drawloom import component
from drawloom.components.model.declarations import (
    FULL,
    JOINED_CONVOLUTION,
    LINEAR,
    MIXTRAL_EXPERTS,
    NO_POSITIONS,
    ChannelDeltaSpec,
    DecoderBuilder,
    LinearLayersConfig,
    PartSpec,
    size_setting,
)
from drawloom.components.model.glm4_moe_lite import Glm4MoeLiteConfig
from drawloom.ports import ConfigJson

NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Sizes in `linear_attn_config`."""


class KimiLinearConfig(LinearLayersConfig, Glm4MoeLiteConfig):
    """Config of Kimi Linear: latent attention without positions, and Kimi Delta Attention in other layers."""

    unused_keys = (*NO_POSITIONS, "rope_interleave")
    can_tie = False
    renamed = {
        "head_dim": "qk_rope_head_dim",
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    joins_of_modules = (JOINED_CONVOLUTION,)
    inserted_dims = {"A_log": (1, 0, 0)}  # to (1, 1, heads, 1)
    renamed_tensors = {
        r"\.self_attn\.in_proj_([qkvb])\.": r".self_attn.\1_proj.",
        r"\.self_attn\.conv_([qkv])$": r".self_attn.\1_conv1d.weight",
        r"\.self_attn\.norm\.": ".self_attn.o_norm.",
        r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
        **MIXTRAL_EXPERTS,
    }
    renamed_modules = {
        r"\.block_sparse_moe\.": ".mlp.",
        r"\.self_attn\.(A_log|dt_bias|f_[ab]_proj)": r".self_attn.forget_gate.\1",
    }

    linear_num_heads: int = size_setting("num_attention_heads", "number of heads in linear layers", default=32)
    linear_head_dim: int = size_setting("head_dim", "width of keys and values in linear layers", default=128)
    q_lora_rank: int = 0

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        if self.layer_types[layer] == FULL:
            return super().mixer_of(layer)
        heads, width = self.linear_num_heads, self.linear_head_dim
        spec = ChannelDeltaSpec(
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=width,
            linear_value_head_dim=width,
            rank=width,
            taps=self.linear_conv_kernel_dim,
            draws_time_steps=True,
        )
        return "self_attn", spec

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Read layer types and sizes from `linear_attn_config`, whose layers count from 1, as in published configs."""
        config, nested = super().read_keys(config), config.get("linear_attn_config") or {}
        config |= {ours: nested[theirs] for theirs, ours in NESTED.items() if theirs in nested}
        if not config.get("layer_types"):
            layers = range(1, (config.get("num_hidden_layers") or 0) + 1)
            full = nested.get("full_attn_layers", [layer for layer in layers if layer > 1 and layer % 4 == 1])
            if not isinstance(full, list):
                raise ValueError(f"says full_attn_layers = {full!r}, which is not a list of layers")
            config["layer_types"] = [FULL if layer in full else LINEAR for layer in layers]
        return config

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """Write layer types and sizes in both forms: transformers' and the published one."""
        types = list(enumerate(config["layer_types"], 1))
        layers = {kind: [n for n, other in types if other == kind] for kind in (FULL, LINEAR)}
        nested = {theirs: config[ours] for theirs, ours in NESTED.items()}
        lists = {"full_attn_layers": layers[FULL], "kda_layers": layers[LINEAR]}
        return super().write_keys({**config, "linear_attn_config": nested | lists})


@component(impact="incompatible")
class KimiLinear(DecoderBuilder):
    """A Kimi Linear language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = KimiLinearConfig
    model_type = "kimi_linear"
    class_name = "KimiLinearForCausalLM"
    hf_defaults = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "num_experts_per_tok": 8}
    fixed = {"mla_use_nope": True, "moe_layer_freq": 1}
    has_classifier = False
