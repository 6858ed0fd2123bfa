"""The component `model.qwen3_5`: dense Qwen3.5 for text (Qwen team 2026)."""

from drawloom import component
from drawloom.components.model.declarations import HYBRID_DEFAULTS, DecoderBuilder, Family, HybridConfig


@component(impact="incompatible")
class Qwen35(DecoderBuilder):
    """A dense Qwen3.5 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        HybridConfig,
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        hf_defaults=HYBRID_DEFAULTS | {"num_key_value_heads": 4},
        derives_head_dim=False,
        nested_types={"qwen3_5": "model."},
        ignored=("mtp.*", "model.visual.*"),
    )
