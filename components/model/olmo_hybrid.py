"""The component `model.olmo_hybrid`: OLMo Hybrid (OLMo team 2026)."""

from drawloom import component
from drawloom.components.model.declarations import (
    FULL,
    JOINED_CONVOLUTION,
    NO_POSITIONS,
    DecoderBuilder,
    DeltaConfig,
    Norms,
    training_setting,
)
from drawloom.components.model.olmo2 import Olmo2Config
from drawloom.ports import ConfigJson

WITHOUT_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
"""Rotary positions of published models; with null or nothing transformers rotates."""


class OlmoHybridConfig(DeltaConfig):
    """Config of OLMo Hybrid: pre-norm gated delta nets, and OLMo 3's attention without positions and windows."""

    unused_keys = NO_POSITIONS
    qk_norm = "projection"
    norm_eps = 1e-5
    draws_time_steps = True
    joins_of_modules = (JOINED_CONVOLUTION,)
    renamed_tensors = {
        r"\.linear_attn\.in_proj_z\.": ".linear_attn.g_proj.",
        r"\.linear_attn\.in_proj_([qkvab])\.": r".linear_attn.\1_proj.",
        r"\.linear_attn\.conv_([qkv])$": r".linear_attn.\1_conv1d.weight",
        r"\.linear_attn\.norm\.": ".linear_attn.o_norm.",
        r"\.linear_attn\.out_proj\.": ".linear_attn.o_proj.",
    }
    renamed_modules = {
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    }

    max_position_embeddings: int = 65_536
    linear_allow_neg_eigval: bool = training_setting("write values with strengths up to 2 instead of 1", default=True)

    @property
    def max_strength(self) -> float:
        """The delta nets' greatest strength."""
        return 2.0 if self.linear_allow_neg_eigval else 1.0

    def norms_of(self, layer: int) -> tuple[Norms, Norms]:
        if self.layer_types[layer] == FULL:
            return Olmo2Config.norms
        # Files have these names, unlike the modules of transformers.
        return ("attention_layer_norm", None), ("feedforward_layer_norm", None)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Fill in the sizes of linear layers that follow from others. Raises ValueError if a layer has positions."""
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", config.get("rope_theta", 1e4))
        if theta is not None:
            why = "only layers without positions can be built, as in published models, whose rope_theta is null"
            raise ValueError(f"has rotary positions with rope_theta = {theta}, and {why}")
        heads, width = config.get("num_attention_heads"), config.get("hidden_size")
        if heads and width:
            sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
            config = sizes | {key: value for key, value in config.items() if value is not None}
            config.setdefault("linear_key_head_dim", int(0.75 * width / config["linear_num_key_heads"]))
            config.setdefault("linear_value_head_dim", 2 * config["linear_key_head_dim"])
        return config | WITHOUT_THETA


@component(impact="incompatible")
class OlmoHybrid(DecoderBuilder):
    """An OLMo Hybrid language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = OlmoHybridConfig
    model_type = "olmo_hybrid"
    class_name = "OlmoHybridForCausalLM"
    fixed = WITHOUT_THETA
    has_classifier = False
