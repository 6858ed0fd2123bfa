"""The component `model.qwen3_5`: dense Qwen3.5 for text (Qwen team 2026)."""

from drawloom import component
from drawloom.components.model.declarations import HYBRID_DEFAULTS, DecoderBuilder, HybridConfig


@component(impact="incompatible")
class Qwen35(DecoderBuilder):
    """A dense Qwen3.5 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    config_type = HybridConfig
    model_type = "qwen3_5_text"
    class_name = "Qwen3_5ForCausalLM"
    hf_defaults = HYBRID_DEFAULTS | {"num_key_value_heads": 4}
    nested_types = {"qwen3_5": "model."}
    ignored = ("mtp.*", "model.visual.*")
