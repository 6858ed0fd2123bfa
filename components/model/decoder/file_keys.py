"""Keys and tensors that have other forms in files: lists by layer, rotary positions by type of layer, experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from drawloom.components.model.decoder.config import LayerTypesConfig, config_class
from drawloom.components.model.decoder.rope import Rope
from drawloom.ports import ConfigJson

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys in `rope_parameters` for positions in images, which do not matter to text."""

MIXTRAL_EXPERTS = {
    r"\.mlp\.(gate|shared_experts|experts)\.": r".block_sparse_moe.\1.",
    r"(\.experts\.\d+)\.gate_proj\.": r"\1.w1.",
    r"(\.experts\.\d+)\.up_proj\.": r"\1.w3.",
    r"(\.experts\.\d+)\.down_proj\.": r"\1.w2.",
}
"""Patterns for files in which experts have Mixtral's names."""


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
        """The base in layers with a window for families without a key for it."""
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
