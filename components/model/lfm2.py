"""The component `model.lfm2`: LFM2 and LFM2.5 for text, dense (Liquid AI 2025, arXiv 2511.23404)."""

from typing import Literal

from drawloom import component
from drawloom.components.model.declarations import (
    FULL,
    DecoderBuilder,
    DecoderConfig,
    Join,
    PartSpec,
    ShortConvSpec,
    layer_types_setting,
    size_setting,
)
from drawloom.ports import ConfigJson


class Lfm2Config(DecoderConfig):
    """Config of LFM2: layers of type conv have a gated short convolution instead of attention."""

    qk_norm = "head"
    renamed = {"rms_norm_eps": "norm_eps"}
    joins = (Join("in_proj.weight", "in_proj_{}.weight", "bcx"),)
    renamed_tensors = {
        r"\.conv\.taps$": ".conv.conv.weight",
        r"\.self_attn\.o_proj\.": ".self_attn.out_proj.",
        r"\.self_attn\.([qk])_norm\.": r".self_attn.\1_layernorm.",
        r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
        r"\.mlp\.up_proj\.": ".feed_forward.w3.",
        r"\.mlp\.down_proj\.": ".feed_forward.w2.",
        r"\.input_layernorm\.": ".operator_norm.",
        r"\.post_attention_layernorm\.": ".ffn_norm.",
        r"^model\.norm\.": "model.embedding_norm.",
    }

    max_position_embeddings: int = 128_000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    layer_types: list[Literal["full_attention", "conv"]] = layer_types_setting(3, "conv")
    conv_L_cache: int = size_setting("taps", "number of tokens in a convolution", default=3)

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        is_full = self.layer_types[layer] == FULL
        return super().mixer_of(layer) if is_full else ("conv", ShortConvSpec(taps=self.conv_L_cache))

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert older keys, and compute the feed-forward network's width from a Llama-like one."""
        full = config.get("full_attn_idxs")  # an empty list leaves only convolutions
        layers = range(config.get("num_hidden_layers") or 0)
        types = [FULL if full is None or layer in full else "conv" for layer in layers]
        width = config.get("block_ff_dim", config.get("intermediate_size"))
        if config.get("block_auto_adjust_ff_dim", True) and width:
            multiple = config.get("block_multiple_of") or 256
            width = int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
            width = -(-width // multiple) * multiple
        tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        changes = {"intermediate_size": width, "tie_word_embeddings": tied, "block_auto_adjust_ff_dim": False}
        return config | changes | {"layer_types": config.get("layer_types") or types}


@component(impact="incompatible")
class Lfm2(DecoderBuilder):
    """An LFM2 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Lfm2Config
    model_type = "lfm2"
    class_name = "Lfm2ForCausalLM"
    has_classifier = False
    hf_defaults = {"rope_theta": 1e6, "num_key_value_heads": 8}
    fixed = {"conv_bias": False, "block_auto_adjust_ff_dim": False}
