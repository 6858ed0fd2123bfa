"""The component `model.smollm3`: SmolLM3 (Hugging Face 2025)."""

from typing import Literal

from drawloom import component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    Rope,
    periodic_setting,
    training_setting,
    window_setting,
)
from drawloom.components.model.llama import LlamaConfig


class SmolLm3Config(LlamaConfig):
    """
    Config of SmolLM3: Llama with layers without rotary positions (NoPE, arXiv 2501.18795).

    `no_rope_layers` has a 1 for each layer with positions and a 0 for each layer without; default: every fourth layer
    is without. With `use_sliding_window`, layers without positions have a window.
    """

    periods = {"no_rope_layers": ("no_rope_layer_interval", 1, 0)}

    max_position_embeddings: int = 65_536
    rope_theta: float = 2e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    no_rope_layers: list[Literal[0, 1]] = periodic_setting(
        "1 for every layer with rotary positions, 0 for every layer without; default: every fourth is without", 4, 1, 0
    )
    use_sliding_window: bool = training_setting(
        "use a sliding window in layers without rotary positions", default=False
    )
    sliding_window: int | None = window_setting()

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.no_rope_layers[layer] else None

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.use_sliding_window and not self.no_rope_layers[layer] else None


@component(impact="incompatible")
class SmolLm3(DecoderBuilder):
    """A SmolLM3 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = SmolLm3Config
    model_type = "smollm3"
    class_name = "SmolLM3ForCausalLM"
    hf_defaults = {"max_position_embeddings": 32_768, "rope_theta": 2e6, "num_key_value_heads": 4}
