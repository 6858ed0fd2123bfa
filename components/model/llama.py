"""The component `model.llama`: Llama 3 (Llama team 2024, arXiv 2407.21783) and its predecessors."""

from drawloom import component, setting
from drawloom.components.model.declarations import (
    ATTENTION_BIAS,
    DecoderConfig,
    ParametrizedBuilder,
)


class LlamaConfig(DecoderConfig):
    """Config of Llama: no norms of queries and keys, and optional biases."""

    max_position_embeddings: int = 8192
    rope_theta: float = 5e5
    rms_norm_eps: float = 1e-5
    attention_bias: bool = setting(ATTENTION_BIAS, default=False)
    mlp_bias: bool = setting("add biases to the linear layers of the feed-forward network", default=False)


@component(impact="incompatible")
class Llama(ParametrizedBuilder):
    """A Llama language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = LlamaConfig
    model_type = "llama"
    class_name = "LlamaForCausalLM"
    hf_defaults = {"max_position_embeddings": 2048, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
