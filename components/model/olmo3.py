"""The component `model.olmo3`: OLMo 3 (OLMo team 2025, arXiv 2512.13961)."""

from collections.abc import Sequence
from typing import Any

import attrs

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import LayerTypesConfig, post_norm_branches
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.rope import Rope, join_rope_by_layer_type, split_rope_by_layer_type
from drawloom.components.model.decoder.specs import Branch
from drawloom.graph import at_least, component, setting

THETA = 5e5


@attrs.frozen(kw_only=True)
class Olmo3Config(LayerTypesConfig):
    """Config of OLMo 3: OLMo 2 with three layers with a window to one without, whose positions alone are scaled."""

    qk_norm = "projection"

    max_position_embeddings: int = 8192
    rope_theta: float = THETA
    attention_bias: bool = False

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias and projection in ("q_proj", "k_proj", "v_proj", "o_proj")

    def branches_of(self, layer: int) -> Sequence[Branch]:
        return post_norm_branches(self, layer)

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.window_of(layer) is None else Rope(self.rotary_dim, self.rope_theta)


def _convert_config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the rotary bases by layer type by a single base. Raises ValueError if they differ."""
    config = split_rope_by_layer_type(config, "sliding_theta", THETA)
    full = config.get("rope_parameters") or {}
    theta = full.get("rope_theta", config.get("rope_theta", THETA)) if isinstance(full, dict) else THETA
    if (sliding := config.pop("sliding_theta", theta)) != theta:
        raise ValueError(
            f"has rope_theta = {sliding} for sliding and {theta} for full attention; only equal ones can be built"
        )
    return config


def _join_rope_parameters_for_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Convert rotary positions to rope_parameters by layer type, with one base."""
    return join_rope_by_layer_type(config, config["rope_theta"])


OLMO3 = Family(
    "model.olmo3",
    "an OLMo 3 model",
    Olmo3Config,
    "olmo3",
    "Olmo3ForCausalLM",
    hf_defaults={"max_position_embeddings": 2048, "rope_theta": THETA, "rms_norm_eps": 1e-5},
    read=_convert_config_from_hf,
    write=_join_rope_parameters_for_hf,
)


@component(impact="incompatible")
class Olmo3(DecoderBuilder):
    """An OLMo 3 language model, with sizes from this table or a Hugging Face `config.json`."""

    family = OLMO3

    attention_bias: bool | None = setting(
        default=None, doc="add biases to the linear layers of attention; default: false"
    )
    sliding_window: int | None = setting(
        default=None,
        check=at_least(1),
        impact="changes_training",
        doc="number of tokens that a token attends to in layers with a window, including itself; default: 4096",
    )
    layer_types: list[str] | None = setting(
        default=None,
        impact="changes_training",
        doc="full_attention or sliding_attention for every layer; default: every fourth is full_attention",
    )
