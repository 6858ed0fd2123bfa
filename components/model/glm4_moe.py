"""The component `model.glm4_moe`: GLM-4.5, 4.6 and 4.7 (GLM team 2025, arXiv 2508.06471)."""

from drawloom import component, setting
from drawloom.components.model.declarations import (
    DecoderBuilder,
    SigmoidExpertsConfig,
    rotary_factor_setting,
)


class Glm4MoeConfig(SigmoidExpertsConfig):
    """Config of GLM-4.5: DeepSeek-V3's experts, and attention in which a part of each head is rotated."""

    qk_norm = "head"
    output_bias = False

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = rotary_factor_setting(0.5)
    use_qk_norm: bool = setting("apply RMSNorm to queries and keys by head", default=False)
    attention_bias: bool = setting("add biases to queries, keys and values", default=False)


@component(impact="incompatible")
class Glm4Moe(DecoderBuilder):
    """A GLM-4.5 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Glm4MoeConfig
    model_type = "glm4_moe"
    class_name = "Glm4MoeForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 131_072,
        "rope_theta": 1e4,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
    }
    has_classifier = False
