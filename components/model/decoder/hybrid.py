"""Configs for decoders with gated delta nets, and attention in every fourth layer."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal

from drawloom import setting
from drawloom.components.model.decoder.config import (
    ATTENTION_BIAS,
    DecoderConfig,
    config_class,
    rotary_factor_setting,
    size_setting,
)
from drawloom.components.model.decoder.layer_types import (
    FULL,
    OF_IMAGES,
    alternate_layer_types,
    fill_layer_list,
    layer_types_setting,
)
from drawloom.components.model.decoder.mixer_specs import DeltaSpec
from drawloom.components.model.decoder.specs import PartSpec
from drawloom.components.weights.mapper import sequential
from drawloom.components.weights.mapper_ops import concatenate, unsqueeze
from drawloom.ports import ConfigJson, Mapper

LINEAR = "linear_attention"

NO_POSITIONS = "rope_theta", "rope_scaling"
"""The `unused_keys` of families without rotary positions."""


@config_class
class LinearLayersConfig(DecoderConfig):
    """Config for a decoder whose linear_attention layers have a recurrent part instead of attention."""

    layer_types: list[Literal["full_attention", "linear_attention"]] = layer_types_setting(4, LINEAR)
    linear_conv_kernel_dim: int = size_setting("taps", "number of tokens in a convolution", default=4)


@config_class
class DeltaConfig(LinearLayersConfig):
    """Config for a decoder whose linear_attention layers have a gated delta net."""

    multiples = (("linear_num_value_heads", "linear_num_key_heads"),)

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
        return DeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
        )

    def mixer_of(self, layer: int) -> tuple[str, PartSpec]:
        return super().mixer_of(layer) if self.layer_types[layer] == FULL else ("linear_attn", self.delta)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Drop keys for positions in images, which text lacks, and derive missing layer types."""
        rope = config.get("rope_parameters")
        if isinstance(rope, Mapping):
            kept = {key: value for key, value in rope.items() if key not in OF_IMAGES}
            config = {**config, "rope_parameters": kept}
        interval = config.get("full_attention_interval", 4)
        return fill_layer_list(config, "layer_types", interval, partial(alternate_layer_types, other=LINEAR))


@config_class
class HybridConfig(DeltaConfig):
    """Config of Qwen3.5: gated delta nets, and gated attention in full_attention layers."""

    qk_norm = "head"
    zero_centered = True
    attention_gate = True

    rope_theta: float = 1e7
    partial_rotary_factor: float = rotary_factor_setting(0.25)

    def join_tensors(self, name: str) -> Iterator[Mapper]:
        """Yield the mappers that join a delta net's projections, and its convolutions to one (channels, 1, taps)."""
        net, is_net, _ = name.partition(".A_log")
        if is_net:
            convolution, parts = f"{net}.conv1d.weight", [f"{net}.conv_{part}" for part in "qkv"]
            joined = concatenate(parts, convolution, sizes=self.delta.channels)
            yield sequential(joined, unsqueeze(convolution, 1))
            yield from self.join_projections(net)

    def join_projections(self, net: str) -> Iterator[Mapper]:
        """Yield the mapper that joins the q, k and v projections in the gated delta net `net`."""
        parts = [f"{net}.in_proj_{part}.weight" for part in "qkv"]
        yield concatenate(parts, f"{net}.in_proj_qkv.weight", sizes=self.delta.channels)


HYBRID_DEFAULTS = {"rope_theta": 1e4, "head_dim": 256}
"""Defaults of keys in transformers, which differ from ours."""
