"""The component `model.olmo2`: OLMo 2 (OLMo team 2025, arXiv 2501.00656)."""

from drawloom import component, setting
from drawloom.components.model.declarations import (
    ATTENTION_BIAS,
    DecoderBuilder,
    DecoderConfig,
)


class Olmo2Config(DecoderConfig):
    """Config of OLMo 2: norms after attention and feed-forward networks, and of whole queries and keys."""

    qk_norm = "projection"
    norms = (None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")

    max_position_embeddings: int = 4096
    rope_theta: float = 5e5
    attention_bias: bool = setting(ATTENTION_BIAS, default=False)


@component(impact="incompatible")
class Olmo2(DecoderBuilder):
    """An OLMo 2 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Olmo2Config
    model_type = "olmo2"
    class_name = "Olmo2ForCausalLM"
    hf_defaults = {"max_position_embeddings": 2048, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
