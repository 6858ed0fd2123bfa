"""The component `model.qwen3.dense`."""

from drawloom import component
from drawloom.components.model.decoder.builder import ParametrizedBuilder
from drawloom.components.model.decoder.config import DecoderConfig

FIXED = {"attention_bias": False, "use_sliding_window": False}


class Qwen3Config(DecoderConfig):
    """Config of Qwen3: queries and keys are normed by head."""

    qk_norm = "head"


@component(impact="incompatible")
class Qwen3Dense(ParametrizedBuilder):
    """A Qwen3 dense language model, of sizes given here or by a Hugging Face `config.json`."""

    config_type = Qwen3Config
    model_type = "qwen3"
    class_name = "Qwen3ForCausalLM"
    fixed = FIXED
    derives_head_dim = False
