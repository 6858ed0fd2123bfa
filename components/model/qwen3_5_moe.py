"""The component `model.qwen3_5_moe`: Qwen3.5 with experts, for text (Qwen team 2026)."""

from typing import Any

import attrs

from drawloom.components.model.decoder.config import MoeConfig, create_size_check
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.hybrid import (
    HYBRID_DEFAULTS,
    HybridBuilder,
    HybridConfig,
    convert_hybrid_config_from_hf,
)
from drawloom.components.model.decoder.specs import ExpertSpec, MlpSpec
from drawloom.components.model.qwen3.moe import MOE
from drawloom.components.model.qwen3_5 import create_qwen3_5_mapper
from drawloom.components.ports.recurrence import HybridKernels
from drawloom.graph import at_least, component, component_base_class, setting


@attrs.frozen(kw_only=True, slots=False)
class Qwen35MoeConfig(HybridConfig, MoeConfig):
    """Config of Qwen3.5 with experts: all tokens visit one expert more, whose output has a gate."""

    shared_expert_intermediate_size: int = 512

    @property
    def shared_expert_width(self) -> int:
        return self.shared_expert_intermediate_size

    def mlp_spec_of(self, layer: int) -> MlpSpec | ExpertSpec:
        spec = super().mlp_spec_of(layer)
        return attrs.evolve(spec, shared="shared_expert", shared_gate=True) if isinstance(spec, ExpertSpec) else spec


def _convert_config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in intermediate_size, which files lack because no layer is dense, and derive missing layer types."""
    choices, width = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
    if "intermediate_size" not in config and type(choices) is int and type(width) is int:
        config = {**config, "intermediate_size": choices * width}
    return convert_hybrid_config_from_hf(config)


QWEN3_5_MOE = Family(
    "model.qwen3_5_moe",
    "a Qwen3.5 text model with experts",
    Qwen35MoeConfig,
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    needed=MOE.needed,
    hf_defaults=HYBRID_DEFAULTS | {"num_key_value_heads": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    derives_head_dim=False,
    nested_types={"qwen3_5_moe": "model."},
    ignored=("mtp.*", "model.visual.*"),
    read=_convert_config_from_hf,
    mapper=create_qwen3_5_mapper,
    has_classifier=False,
)


@component_base_class
class HybridMoeBuilder(HybridBuilder):
    """Builder of a decoder with gated delta nets and experts."""

    kernels: HybridKernels
    num_experts: int | None = setting(
        default=None, check=create_size_check("num_experts"), doc="number of experts per layer"
    )
    num_experts_per_tok: int | None = setting(
        default=None, check=create_size_check("num_experts_per_tok"), doc="number of experts per token"
    )
    moe_intermediate_size: int | None = setting(
        default=None, check=create_size_check("moe_intermediate_size"), doc="inner width of an expert"
    )
    shared_expert_intermediate_size: int | None = setting(
        default=None,
        check=create_size_check("intermediate_size"),
        doc="inner width of the expert that all tokens visit; default: 512",
    )
    router_aux_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="load-balancing loss coefficient; default: the config's, or 0.001",
    )
    router_z_loss_coef: float | None = setting(
        default=None,
        check=at_least(0),
        impact="changes_training",
        doc="router z-loss coefficient, to keep the router's logits small; default: the config's, or 0",
    )


@component(impact="incompatible")
class Qwen35Moe(HybridMoeBuilder):
    """A Qwen3.5 language model with experts, with sizes from this table or a Hugging Face `config.json`."""

    family = QWEN3_5_MOE
