"""The component `model.llama`: Llama 3 (Llama team 2024, arXiv 2407.21783) and those before it."""

import attrs

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.graph import component, setting


@attrs.frozen(kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama: no norms of queries and keys, and biases only where a config asks for them."""

    max_position_embeddings: int = 8192
    rope_theta: float = 5e5
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def has_bias(self, projection: str) -> bool:
        """Of attention, or of the feed-forward network."""
        of_mlp = projection in ("gate_proj", "up_proj", "down_proj")
        return self.mlp_bias if of_mlp else self.attention_bias


LLAMA = Family(
    "model.llama",
    "a Llama model",
    LlamaConfig,
    "llama",
    "LlamaForCausalLM",
    hf_defaults={"max_position_embeddings": 2048, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
)


@component(impact="incompatible")
class Llama(DecoderBuilder):
    """A Llama language model, of sizes given here or by a Hugging Face `config.json`."""

    family = LLAMA

    attention_bias: bool | None = setting(
        default=None, doc="whether the linear layers of attention have biases; false if left out"
    )
    mlp_bias: bool | None = setting(
        default=None, doc="whether the linear layers of the feed-forward network have biases; false if left out"
    )
