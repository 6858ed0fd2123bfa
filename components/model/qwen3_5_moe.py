"""The component `model.qwen3_5_moe`: Qwen3.5 with experts, for text (Qwen team 2026)."""

from drawloom import component
from drawloom.components.model.declarations import (
    HYBRID_DEFAULTS,
    DecoderBuilder,
    HybridConfig,
    MoeConfig,
    size_setting,
)
from drawloom.ports import ConfigJson


class Qwen35MoeConfig(HybridConfig, MoeConfig):
    """Config of Qwen3.5 with experts: all tokens visit one expert more, whose output has a gate."""

    stacks_experts = True
    shared_name = "shared_expert"
    shared_expert_gate = True

    shared_expert_intermediate_size: int = size_setting(
        "intermediate_size", "inner width of the expert that all tokens visit", default=512
    )

    @property
    def shared_expert_width(self) -> int:
        return self.shared_expert_intermediate_size

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Fill in intermediate_size, which files lack because no layer is dense."""
        choices, width = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
        if "intermediate_size" not in config and choices and width:
            config = {**config, "intermediate_size": choices * width}
        return config


@component(impact="incompatible")
class Qwen35Moe(DecoderBuilder):
    """A Qwen3.5 language model with experts, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Qwen35MoeConfig
    model_type = "qwen3_5_moe_text"
    class_name = "Qwen3_5MoeForCausalLM"
    hf_defaults = HYBRID_DEFAULTS | {"num_key_value_heads": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    nested_types = {"qwen3_5_moe": "model."}
    ignored = ("mtp.*", "model.visual.*")
    has_classifier = False
