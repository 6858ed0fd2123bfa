"""The component `model.qwen3.dense`."""

from drawloom.components.model.decoder.config import Qwen3Config
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.parametrized import ParametrizedBuilder
from drawloom.graph import component

FIXED = {"attention_bias": False, "use_sliding_window": False}

DENSE = Family(
    "model.qwen3.dense",
    "a Qwen3 dense model",
    Qwen3Config,
    "qwen3",
    "Qwen3ForCausalLM",
    fixed=FIXED,
    derives_head_dim=False,
)


@component(impact="incompatible")
class Qwen3Dense(ParametrizedBuilder):
    """A Qwen3 dense language model, of sizes given here or by a Hugging Face `config.json`."""

    family = DENSE
