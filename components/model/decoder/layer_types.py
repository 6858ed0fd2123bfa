"""
Configs with types of layers: attention in a window or to all tokens, with rotary positions that differ by type, and
recurrent parts instead of attention.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from drawloom import at_least, setting
from drawloom.components.model.decoder.branch_specs import DeltaSpec
from drawloom.components.model.decoder.config import (
    DecoderConfig,
    rotary_factor_setting,
    size_setting,
    training_setting,
)
from drawloom.components.model.decoder.mapper import Join
from drawloom.components.model.decoder.specs import PartSpec, Rope
from drawloom.ports import ConfigJson

ATTENTION_BIAS = "add biases to the linear layers of attention"

FULL, SLIDING = "full_attention", "sliding_attention"

SlidingTypes = list[Literal["full_attention", "sliding_attention"]]
"""Layer types with full attention and with a window."""


def alternate_by_layer(layers: int, period: int, other: Any = SLIDING, last: Any = FULL) -> list[Any]:
    """Return an item for every layer: `last` for the last of every `period` layers, `other` for the rest."""
    return [other if (layer + 1) % period else last for layer in range(layers)]


def periodic_setting(doc: str, period: int, other: Any = SLIDING, last: Any = FULL) -> Any:
    """Declare a list by layer; for its default see `alternate_by_layer`."""
    default = attrs.Factory(
        lambda self: alternate_by_layer(self.num_hidden_layers, period, other, last), takes_self=True
    )
    return training_setting(doc, default=default)


def layer_types_setting(period: int, other: str = SLIDING) -> Any:
    """Declare `layer_types`: by default the last of every `period` layers has full attention."""
    ordinals = {2: "second", 3: "third", 4: "fourth", 6: "sixth"}
    doc = f"{FULL} or {other} for every layer; default: every {ordinals[period]} is {FULL}"
    return periodic_setting(doc, period, other)


def window_setting(default: int | None = None) -> Any:
    """Declare `sliding_window`; None stands for no window."""
    doc = "number of tokens that a token attends to in layers with a window, including itself"
    suffix = "; default: all before it" if default is None else ""
    return training_setting(f"{doc}{suffix}", default=default, check=at_least(1))


class WindowConfig(DecoderConfig):
    """Config with an optional sliding window in all layers."""

    sliding_window: int | None = window_setting()

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window


class LayerTypesConfig(DecoderConfig):
    """
    Config with a type for every layer: full attention, or attention within `sliding_window` tokens.

    `layer_types` may be longer than the model.
    """

    sliding_window: int = window_setting(4096)
    layer_types: SlidingTypes = layer_types_setting(4)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


class RopeByTypeConfig(LayerTypesConfig):
    """Config whose layers with a window have unscaled rotary positions, with the base `sliding_theta_key`."""

    sliding_theta_key: ClassVar[str] = "sliding_theta"
    default_sliding_theta: ClassVar[float] = 1e4

    @property
    def sliding_theta(self) -> float:
        """The base in layers with a window, where the family has no key for it."""
        return self.rope_theta

    def rope_of(self, layer: int) -> Rope | None:
        if self.window_of(layer) is None:
            return super().rope_of(layer)
        return Rope(self.head_dim, getattr(self, self.sliding_theta_key))

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """
        Replace rope_parameters by layer type by full attention's, and put sliding attention's base under its key.

        Raises ValueError if sliding attention scales its positions.
        """
        by_type = config.get("rope_parameters")
        if by_type is None or "rope_type" in by_type or "rope_theta" in by_type:
            return config
        local, full = (by_type.get(kind) or {} for kind in ("sliding_attention", "full_attention"))
        if not isinstance(local, Mapping) or not isinstance(full, Mapping):
            why = "has rope_parameters whose entries for sliding_attention and full_attention are not objects"
            raise ValueError(why)
        if local.get("rope_type", "default") != "default":
            raise ValueError("scales rotary positions of sliding attention, where only full attention can be scaled")
        theta = local.get("rope_theta", cls.default_sliding_theta)
        return {**config, "rope_parameters": full, cls.sliding_theta_key: theta}

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """Write rope_parameters by layer type, as in transformers 5."""
        theta = config["rope_theta"]
        full = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": theta}
        sliding = {"rope_type": "default", "rope_theta": config.get(cls.sliding_theta_key, theta)}
        return {**config, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


LINEAR = "linear_attention"

NO_POSITIONS = "rope_theta", "rope_scaling"
"""`unused_keys` for families without rotary positions."""


JOINED_CONVOLUTION = Join("conv1d.weight", "conv_{}", "qkv")
"""A gated delta net's convolutions in one."""


class LinearLayersConfig(DecoderConfig):
    """Config for a decoder whose linear_attention layers have a recurrent part instead of attention."""

    layer_types: list[Literal["full_attention", "linear_attention"]] = layer_types_setting(4, LINEAR)
    linear_conv_kernel_dim: int = size_setting("taps", "number of tokens in a convolution", default=4)


class DeltaConfig(LinearLayersConfig):
    """Config for a decoder whose linear_attention layers have a gated delta net."""

    multiples = (("linear_num_value_heads", "linear_num_key_heads"),)
    image_keys = ("mrope_section", "mrope_interleaved")
    periods = {"layer_types": ("full_attention_interval", LINEAR, FULL)}

    attention_bias: bool = setting(ATTENTION_BIAS, default=False)
    linear_key_head_dim: int = size_setting("head_dim", "width of a key head in gated delta nets", default=128)
    linear_value_head_dim: int = size_setting("head_dim", "width of a value head in gated delta nets", default=128)
    linear_num_key_heads: int = size_setting(
        "num_attention_heads", "number of key heads in gated delta nets", default=16
    )
    linear_num_value_heads: int = size_setting(
        "num_attention_heads", "number of value heads in gated delta nets", default=32
    )

    @property
    def delta(self) -> DeltaSpec:
        """The gated delta nets' specification."""
        return DeltaSpec.from_config(self, taps=self.linear_conv_kernel_dim)

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        return super().mixer_of(layer) if self.layer_types[layer] == FULL else ("linear_attn", self.delta)


class HybridConfig(DeltaConfig):
    """Config for Qwen3.5: gated delta nets, and gated attention in full_attention layers."""

    qk_norm = "head"
    zero_centered = True
    attention_gate = True
    joins = JOINED_CONVOLUTION, Join("in_proj_qkv.weight", "in_proj_{}.weight", "qkv")

    rope_theta: float = 1e7
    partial_rotary_factor: float = rotary_factor_setting(0.25)


HYBRID_DEFAULTS = {"rope_theta": 1e4, "head_dim": 256}
"""transformers' defaults that differ from ours, by key."""
