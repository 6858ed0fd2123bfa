"""The component `model.smollm3`: SmolLM3 (Hugging Face 2025)."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.rope import InvalidSetting, Rope
from drawloom.components.model.decoder.values import LAYER_NUMBERS
from drawloom.components.model.llama import LlamaConfig
from drawloom.graph import at_least, component, setting


def _compute_default_rope_flags(config: Any) -> tuple[int, ...]:
    """Return 0 for every fourth layer, which has no rotary positions, and 1 for the others."""
    return tuple(int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers))


@attrs.frozen(kw_only=True)
class SmolLm3Config(LlamaConfig):
    """
    Config of SmolLM3: Llama with layers without rotary positions (NoPE, arXiv 2501.18795).

    `no_rope_layers` has a 1 for each layer with positions and a 0 for each layer without; default: every fourth layer
    is without. With `use_sliding_window`, layers without positions have a window.
    """

    max_position_embeddings: int = 65_536
    rope_theta: float = 2e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] = attrs.field(
        default=attrs.Factory(_compute_default_rope_flags, takes_self=True),
        converter=tuple,
        metadata={"values": LAYER_NUMBERS},
    )
    use_sliding_window: bool = False
    sliding_window: int | None = None

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.no_rope_layers[layer] else None

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.use_sliding_window and not self.no_rope_layers[layer] else None

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the inherited faults, and one if `no_rope_layers` is shorter than the model."""
        yield from super().find_faults(given)
        layers, flags = given["num_hidden_layers"], given.get("no_rope_layers")
        if flags is not None and len(flags) < layers:
            why = f"no_rope_layers has {len(flags)} numbers, and num_hidden_layers = {layers}"
            yield InvalidSetting("no_rope_layers", why, f"write {layers} numbers, or leave no_rope_layers out")


def _convert_config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Add `no_rope_layers`, if a config lacks it, computed from `no_rope_layer_interval`."""
    interval, layers = config.get("no_rope_layer_interval", 4), config.get("num_hidden_layers")
    if config.get("no_rope_layers") is None and type(layers) is int and type(interval) is int and interval > 0:
        return {**config, "no_rope_layers": [int((layer + 1) % interval != 0) for layer in range(layers)]}
    return config


SMOLLM3 = Family(
    "model.smollm3",
    "a SmolLM3 model",
    SmolLm3Config,
    "smollm3",
    "SmolLM3ForCausalLM",
    hf_defaults={"max_position_embeddings": 32_768, "rope_theta": 2e6, "num_key_value_heads": 4},
    nullable=("sliding_window",),
    read=_convert_config_from_hf,
)


@component(impact="incompatible")
class SmolLm3(DecoderBuilder):
    """A SmolLM3 language model, with sizes from this table or a Hugging Face `config.json`."""

    family = SMOLLM3

    attention_bias: bool | None = setting(
        default=None, doc="add biases to the linear layers of attention; default: false"
    )
    mlp_bias: bool | None = setting(
        default=None, doc="add biases to the linear layers of the feed-forward network; default: false"
    )
    no_rope_layers: list[int] | None = setting(
        default=None,
        impact="changes_training",
        doc="1 for every layer with rotary positions, 0 for every layer without; default: every fourth is without",
    )
    use_sliding_window: bool | None = setting(
        default=None,
        impact="changes_training",
        doc="use a sliding window in layers without rotary positions; default: false",
    )
    sliding_window: int | None = setting(
        default=None,
        check=at_least(1),
        impact="changes_training",
        doc="number of tokens that a token attends to in layers with a window, including itself",
    )
