"""The component `model.glm4_moe`: GLM-4.5, 4.6 and 4.7 (GLM team 2025, arXiv 2508.06471)."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import find_rotary_dim_faults
from drawloom.components.model.decoder.grouped_experts import RENAMED, SigmoidExpertsBuilder, SigmoidExpertsConfig
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.rope import InvalidSetting
from drawloom.components.model.decoder.specs import MixerSpec
from drawloom.components.model.qwen3.moe import MOE
from drawloom.graph import between, component, setting


@attrs.frozen(kw_only=True)
class Glm4MoeConfig(SigmoidExpertsConfig):
    """Config of GLM-4.5: DeepSeek-V3's experts, and attention in which a part of each head is rotated."""

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    attention_bias: bool = False

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def mixer_spec_of(self, layer: int) -> MixerSpec:
        plain = self.grouped_attention_spec_of(layer)
        return attrs.evolve(plain, qk_norm="head") if self.use_qk_norm else plain

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias and projection in ("q_proj", "k_proj", "v_proj")

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        yield from super().find_faults(given)
        yield from find_rotary_dim_faults({"partial_rotary_factor": 0.5, **given})


GLM4_MOE = Family(
    "model.glm4_moe",
    "a GLM-4.5 model",
    Glm4MoeConfig,
    "glm4_moe",
    "Glm4MoeForCausalLM",
    needed=MOE.needed,
    hf_defaults={
        "max_position_embeddings": 131_072,
        "rope_theta": 1e4,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
    },
    renamed=RENAMED,
    ignored=("model.layers.{layers}.*",),
    has_classifier=False,
)


@component(impact="incompatible")
class Glm4Moe(SigmoidExpertsBuilder):
    """A GLM-4.5 language model, with sizes from this table or a Hugging Face `config.json`."""

    family = GLM4_MOE

    partial_rotary_factor: float | None = setting(
        default=None,
        check=between(0.01, 1.001),
        impact="changes_training",
        doc="part of the channels of a head that rotary positions rotate; default: 0.5",
    )
    use_qk_norm: bool | None = setting(default=None, doc="apply RMSNorm to queries and keys by head; default: false")
    attention_bias: bool | None = setting(default=None, doc="add biases to queries, keys and values; default: false")
