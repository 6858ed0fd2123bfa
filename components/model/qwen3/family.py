"""The two families of Qwen3 models: their settings, and how Hugging Face names them."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.config import Qwen3Config, Qwen3MoeConfig


@attrs.frozen
class Family:
    """
    A family: its component's name, its architecture, and how a `config.json` speaks of it.

    `needed` are settings that have no default; `hf_defaults` is what transformers takes where a config leaves a key
    out, as far as that is not our default.
    """

    component: str
    called: str
    architecture: type[Qwen3Config]
    model_type: str
    class_name: str
    needed: tuple[str, ...]
    hf_defaults: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys of a `config.json` that are read and written as they are; rotary positions have two forms."""
        return [field.name for field in attrs.fields(self.architecture) if field.name != "rope_scaling"]

    @property
    def settings(self) -> list[str]:
        """The names of the settings that a config gives."""
        return [*self.keys, "rope_scaling", "rope_parameters"]


DENSE = Family(
    "model.qwen3.dense",
    "a Qwen3 dense model",
    Qwen3Config,
    "qwen3",
    "Qwen3ForCausalLM",
    needed=("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
)

MOE = Family(
    "model.qwen3.moe",
    "a Qwen3 model with experts",
    Qwen3MoeConfig,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    needed=(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
    hf_defaults={"norm_topk_prob": False},
)
