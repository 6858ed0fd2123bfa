"""Config and settings for decoders with gated delta nets, and gated attention in every fourth layer (Qwen team)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import FULL, DecoderConfig, create_size_check, find_rotary_dim_faults
from drawloom.components.model.decoder.hugging_face import OF_IMAGES
from drawloom.components.model.decoder.rope import InvalidSetting
from drawloom.components.model.decoder.specs import Branch, DeltaSpec, MixerSpec
from drawloom.components.model.decoder.values import create_word_list_check
from drawloom.components.ports.recurrence import RecurrentKernels
from drawloom.graph import between, component_base_class, setting

LINEAR = "linear_attention"


def default_layer_types(layers: int, interval: int = 4) -> tuple[str, ...]:
    """Return the layer types: the last of every `interval` layers has full attention."""
    return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layers))


@attrs.frozen(kw_only=True, slots=False)
class HybridConfig(DecoderConfig):
    """Config for a decoder whose linear_attention layers have a gated delta net instead of attention."""

    qk_norm = "head"
    zero_centered = True

    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: tuple[str, ...] = attrs.field(
        default=attrs.Factory(lambda self: default_layer_types(self.num_hidden_layers), takes_self=True),
        converter=tuple,
        metadata={"values": create_word_list_check(FULL, LINEAR)},
    )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def delta(self) -> DeltaSpec:
        """The gated delta nets' specification."""
        return DeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
        )

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias and projection in ("q_proj", "k_proj", "v_proj", "o_proj")

    def mixer_spec_of(self, layer: int) -> MixerSpec:
        return attrs.evolve(self.grouped_attention_spec_of(layer), gate=True)

    def branches_of(self, layer: int) -> Sequence[Branch]:
        first, last = super().branches_of(layer)
        if self.layer_types[layer] == FULL:
            return first, last
        return attrs.evolve(first, name="linear_attn", spec=self.delta), last

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the faults if the rotated channels are odd, layers lack types, or value heads do not fit key heads."""
        yield from super().find_faults(given)
        yield from find_rotary_dim_faults({"partial_rotary_factor": 0.25, **given})
        layers, types = given["num_hidden_layers"], given.get("layer_types")
        if types is not None and len(types) < layers:
            why = f"layer_types has {len(types)} types, and num_hidden_layers = {layers}"
            yield InvalidSetting("layer_types", why, f"write {layers} types, or leave layer_types out")
        keys, values = given.get("linear_num_key_heads", 16), given.get("linear_num_value_heads", 32)
        if values % keys:
            why = f"linear_num_value_heads = {values} is not divisible by linear_num_key_heads = {keys}"
            yield InvalidSetting("linear_num_value_heads", why, f"write {keys}, or a multiple of it")


def convert_hybrid_config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a `config.json`: drop keys for positions in images, which text lacks, and derive missing layer types."""
    interval, layers = config.get("full_attention_interval", 4), config.get("num_hidden_layers")
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        kept = {key: value for key, value in rope.items() if key not in OF_IMAGES}
        config = {**config, "rope_parameters": kept}
    if config.get("layer_types") is None and type(interval) is int and type(layers) is int and interval > 0:
        return {**config, "layer_types": list(default_layer_types(layers, interval))}
    return config


HYBRID_DEFAULTS = {"rope_theta": 1e4, "head_dim": 256}
"""Defaults of keys in transformers, which differ from ours."""


def find_delta_net_paths(parameters: Iterable[str]) -> list[str]:
    """Return the paths to the gated delta nets with these parameters."""
    return [name.removesuffix(".A_log") for name in parameters if name.endswith(".linear_attn.A_log")]


@component_base_class
class HybridBuilder(DecoderBuilder):
    """Builder for a decoder with gated delta nets."""

    kernels: RecurrentKernels

    layer_types: list[str] | None = setting(
        default=None,
        impact="changes_training",
        doc="full_attention or linear_attention for every layer; default: every fourth is full_attention",
    )
    partial_rotary_factor: float | None = setting(
        default=None,
        check=between(0.01, 1.001),
        impact="changes_training",
        doc="part of the channels of a head that rotary positions rotate; default: 0.25",
    )
    attention_bias: bool | None = setting(
        default=None, doc="add biases to the linear layers of attention; default: false"
    )
    linear_conv_kernel_dim: int | None = setting(
        default=None, check=between(1, 65), doc="number of tokens in a convolution; default: 4"
    )
    linear_key_head_dim: int | None = setting(
        default=None, check=create_size_check("head_dim"), doc="width of a key head in gated delta nets; default: 128"
    )
    linear_value_head_dim: int | None = setting(
        default=None, check=create_size_check("head_dim"), doc="width of a value head in gated delta nets; default: 128"
    )
    linear_num_key_heads: int | None = setting(
        default=None,
        check=create_size_check("num_attention_heads"),
        doc="number of key heads in gated delta nets; default: 16",
    )
    linear_num_value_heads: int | None = setting(
        default=None,
        check=create_size_check("num_attention_heads"),
        doc="number of value heads in gated delta nets; default: 32",
    )
