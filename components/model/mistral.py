"""The component `model.mistral`: Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and its successors."""

import attrs

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.graph import at_least, component, setting


@attrs.frozen(kw_only=True)
class MistralConfig(DecoderConfig):
    """Mistral: as Llama, with a window in all layers or in none."""

    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None

    def window_of(self, layer: int) -> int | None:
        """The same for all layers."""
        return self.sliding_window


MISTRAL = Family(
    "model.mistral",
    "a Mistral model",
    MistralConfig,
    "mistral",
    "MistralForCausalLM",
    hf_defaults={
        "max_position_embeddings": 131_072,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
    nullable=("sliding_window",),
)


@component(impact="incompatible")
class Mistral(DecoderBuilder):
    """A Mistral language model, of sizes given here or by a Hugging Face `config.json`."""

    family = MISTRAL

    sliding_window: int | None = setting(
        default=None,
        check=at_least(1),
        impact="changes_training",
        doc="how many tokens a token attends to, itself included; all before it if left out",
    )
