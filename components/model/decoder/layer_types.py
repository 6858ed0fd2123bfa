"""Configs with types of layers: attention in a window or to all tokens, and rotary positions that differ by type."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from drawloom import at_least
from drawloom.components.model.decoder.config import WINDOW, DecoderConfig, config_class, training_setting
from drawloom.components.model.decoder.rope import Rope
from drawloom.ports import ConfigJson

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys in `rope_parameters` for positions in images, which do not matter to text."""

FULL, SLIDING = "full_attention", "sliding_attention"

SlidingTypes = list[Literal["full_attention", "sliding_attention"]]
"""Types of layers with full attention and with a window."""


def alternate_layer_types(layers: int, interval: int, other: str = SLIDING) -> list[str]:
    """Return a type for every layer: full attention for the last of every `interval` layers, `other` for the rest."""
    return [other if (layer + 1) % interval else FULL for layer in range(layers)]


def layer_types_setting(interval: int, other: str = SLIDING) -> Any:
    """Declare `layer_types`: by default the last of every `interval` layers has full attention."""
    ordinals = {2: "second", 3: "third", 4: "fourth", 6: "sixth"}
    return training_setting(
        f"{FULL} or {other} for every layer; default: every {ordinals[interval]} is {FULL}",
        default=attrs.Factory(
            lambda self: alternate_layer_types(self.num_hidden_layers, interval, other), takes_self=True
        ),
    )


@config_class
class WindowConfig(DecoderConfig):
    """Config with an optional sliding window in all layers."""

    sliding_window: int | None = training_setting(
        "number of tokens that a token attends to, including itself; default: all before it",
        default=None,
        check=at_least(1),
    )

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window


@config_class
class LayerTypesConfig(DecoderConfig):
    """
    Config with a type for every layer: full attention, or attention within `sliding_window` tokens.

    `layer_types` may be longer than the model.
    """

    sliding_window: int = training_setting(WINDOW, default=4096, check=at_least(1))
    layer_types: SlidingTypes = layer_types_setting(4)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def fill_layer_list(
    config: ConfigJson, key: str, interval: Any, create: Callable[[int, int], Sequence[Any]]
) -> ConfigJson:
    """Return a `config.json` with `create(layers, interval)` for a missing list by layer, if both are numbers."""
    layers = config.get("num_hidden_layers")
    if config.get(key) is None and type(interval) is int and type(layers) is int and interval > 0:
        return {**config, key: create(layers, interval)}
    return config


@config_class
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
        if not isinstance(by_type, Mapping) or "rope_type" in by_type or "rope_theta" in by_type:
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
