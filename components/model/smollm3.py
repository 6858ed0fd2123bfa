"""The component `model.smollm3`: SmolLM3 (Hugging Face 2025)."""

from typing import Literal

import attrs

from drawloom import at_least, component
from drawloom.components.model.declarations import (
    WINDOW,
    DecoderBuilder,
    Family,
    Rope,
    config_class,
    fill_layer_list,
    training_setting,
)
from drawloom.components.model.llama import LlamaConfig
from drawloom.ports import ConfigJson


def _compute_rope_flags(layers: int, interval: int = 4) -> list[int]:
    """Return 0 for the last of every `interval` layers, which has no rotary positions, and 1 for the others."""
    return [int((layer + 1) % interval != 0) for layer in range(layers)]


@config_class
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
    no_rope_layers: list[Literal[0, 1]] = training_setting(
        "1 for every layer with rotary positions, 0 for every layer without; default: every fourth is without",
        default=attrs.Factory(lambda self: _compute_rope_flags(self.num_hidden_layers), takes_self=True),
    )
    use_sliding_window: bool = training_setting(
        "use a sliding window in layers without rotary positions", default=False
    )
    sliding_window: int | None = training_setting(f"{WINDOW}; default: all before it", default=None, check=at_least(1))

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.no_rope_layers[layer] else None

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.use_sliding_window and not self.no_rope_layers[layer] else None

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Add `no_rope_layers`, if a config lacks it, computed from `no_rope_layer_interval`."""
        return fill_layer_list(config, "no_rope_layers", config.get("no_rope_layer_interval", 4), _compute_rope_flags)


@component(impact="incompatible")
class SmolLm3(DecoderBuilder):
    """A SmolLM3 language model, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        SmolLm3Config,
        "smollm3",
        "SmolLM3ForCausalLM",
        hf_defaults={"max_position_embeddings": 32_768, "rope_theta": 2e6, "num_key_value_heads": 4},
    )
