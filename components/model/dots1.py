"""The component `model.dots1`: dots.llm1 (Huo et al. 2025, arXiv 2506.05767)."""

from drawloom import at_least, component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    SigmoidExpertsConfig,
    training_setting,
    window_setting,
)


class Dots1Config(SigmoidExpertsConfig):
    """Config of dots.llm1: Qwen3's attention, DeepSeek-V3's experts, and windows in the last layers."""

    qk_norm = "head"

    sliding_window: int | None = window_setting()
    max_window_layers: int = training_setting("index of the first layer with a window", default=62, check=at_least(0))

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if layer >= self.max_window_layers else None


@component(impact="incompatible")
class Dots1(DecoderBuilder):
    """
    A dots.llm1 language model, with sizes from this table or a Hugging Face `config.json`.

    The layers are those of Qwen3, with the routed and shared experts of DeepSeek-V3. The router scores experts by a
    sigmoid. The phase `phases.router_bias` balances the experts by a bias per expert. A load-balancing loss over the
    tokens of a row and a z-loss are added if their coefficients are set.
    """

    config_type = Dots1Config
    model_type = "dots1"
    class_name = "Dots1ForCausalLM"
    hf_defaults = {
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "rope_theta": 1e4,
        "num_key_value_heads": 32,
    }
    fixed = {"attention_bias": False}
    has_classifier = False
