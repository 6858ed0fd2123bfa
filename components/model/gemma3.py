"""The component `model.gemma3`: Gemma 3 for text (Gemma team 2025, arXiv 2503.19786)."""

from drawloom import above, component, setting
from drawloom.components.model.declarations import (
    ATTENTION_BIAS,
    FULL,
    SLIDING,
    DecoderBuilder,
    GeGlu,
    RopeByTypeConfig,
    SlidingTypes,
    layer_types_setting,
    size_setting,
    training_setting,
)


class GemmaConfig(RopeByTypeConfig):
    """Config of Gemma 3 and 4: four norms per layer, layers with a window, and scaled embeddings."""

    qk_norm = "head"
    norms = (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
    activation = GeGlu()
    sliding_theta_key = "rope_local_base_freq"
    rounds_embedding_multiplier = True  # as in transformers

    tie_word_embeddings: bool = True
    rope_local_base_freq: float = training_setting(
        "base of rotary positions in layers with a window", default=1e4, check=above(1)
    )
    attention_bias: bool = setting(ATTENTION_BIAS, default=False)

    @property
    def embedding_multiplier(self) -> float:  # type: ignore[override]
        return float(self.hidden_size**0.5)


class Gemma3Config(GemmaConfig):
    """Config of Gemma 3: zero-centered norms, and five layers with a window to one without."""

    zero_centered = True
    periods = {"layer_types": ("sliding_window_pattern", SLIDING, FULL)}

    layer_types: SlidingTypes = layer_types_setting(6)
    query_pre_attn_scalar: int = size_setting(
        "head_dim",
        "attention scores are divided by the root of this number",
        default=256,
        impact="changes_training",
    )

    @property
    def attention_score_scale(self) -> float:  # type: ignore[override]
        return float(self.query_pre_attn_scalar**-0.5)


GELU = "gelu_pytorch_tanh"


@component(impact="incompatible")
class Gemma3(DecoderBuilder):
    """A Gemma 3 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Gemma3Config
    model_type = "gemma3_text"
    class_name = "Gemma3ForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
    }
    fixed = {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    nested_types = {"gemma3": "model.language_model."}
    ignored = ("*vision_tower.*", "*multi_modal_projector.*")
