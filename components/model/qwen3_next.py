"""The component `model.qwen3_next`: Qwen3-Next (Qwen team 2025)."""

from drawloom import component
from drawloom.components.model.declarations import (
    HYBRID_DEFAULTS,
    JOINED_CONVOLUTION,
    DecoderBuilder,
    Join,
)
from drawloom.components.model.qwen3.moe import Qwen3MoeConfig
from drawloom.components.model.qwen3_5_moe import Qwen35MoeConfig
from drawloom.ports import ConfigJson


class Qwen3NextConfig(Qwen35MoeConfig, Qwen3MoeConfig):
    """Config of Qwen3-Next: Qwen3.5's layers, but some may have no experts."""

    stacks_experts = False

    @property
    def joins(self) -> tuple[Join, ...]:  # type: ignore[override]
        heads = self.linear_num_key_heads  # with the rows of each key head together
        projections = (Join(f"in_proj_{names}.weight", "in_proj_{}.weight", names, heads) for names in ("qkvz", "ba"))
        return JOINED_CONVOLUTION, *projections

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Fill in transformers' intermediate_size, as layers may be dense."""
        return {"intermediate_size": 5632, **config}


@component(impact="incompatible")
class Qwen3Next(DecoderBuilder):
    """A Qwen3-Next language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Qwen3NextConfig
    model_type = "qwen3_next"
    class_name = "Qwen3NextForCausalLM"
    hf_defaults = HYBRID_DEFAULTS | {
        "num_key_value_heads": 2,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
    }
    ignored = ("mtp.*",)
