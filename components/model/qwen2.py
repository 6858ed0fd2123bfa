"""The component `model.qwen2`: Qwen2 and Qwen2.5 (Qwen team 2024, arXiv 2412.15115)."""

from drawloom import at_least, component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    DecoderConfig,
    training_setting,
    window_setting,
)


class Qwen2Config(DecoderConfig):
    """Config of Qwen2: biases of queries, keys and values, and optional windows from layer `max_window_layers` on."""

    attention_bias = True
    output_bias = False

    use_sliding_window: bool = training_setting("use a sliding window in the last layers", default=False)
    sliding_window: int = window_setting(4096)
    max_window_layers: int = training_setting("index of the first layer with a window", default=28, check=at_least(0))

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.use_sliding_window and layer >= self.max_window_layers else None


@component(impact="incompatible")
class Qwen2(DecoderBuilder):
    """A Qwen2 or Qwen2.5 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Qwen2Config
    model_type = "qwen2"
    class_name = "Qwen2ForCausalLM"
    hf_defaults = {"rope_theta": 1e4, "num_key_value_heads": 32}
