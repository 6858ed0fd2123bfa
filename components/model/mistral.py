"""The component `model.mistral`: Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and its successors."""

from drawloom import component
from drawloom.components.model.declarations import DecoderBuilder, WindowConfig


class MistralConfig(WindowConfig):
    """Config of Mistral: like Llama, with an optional sliding window in all layers."""

    rms_norm_eps: float = 1e-5


@component(impact="incompatible")
class Mistral(DecoderBuilder):
    """A Mistral language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = MistralConfig
    model_type = "mistral"
    class_name = "MistralForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 131_072,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    }
