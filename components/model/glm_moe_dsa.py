"""The component `model.glm_moe_dsa`: GLM-5 (GLM team 2026); shared indexers are of arXiv 2603.12201."""

from collections.abc import Iterator
from typing import Any, Literal

import attrs

from drawloom import component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    InvalidSetting,
    SharedIndexSpec,
    training_setting,
)
from drawloom.components.model.deepseek_v3 import LatentConfig
from drawloom.components.model.deepseek_v32 import DeepseekV32Config
from drawloom.components.model.glm4_moe_lite import Glm4MoeLite
from drawloom.ports import ConfigJson, Settings

FULL: Literal["full"] = "full"
SHARED: Literal["shared"] = "shared"


class GlmDsaConfig(DeepseekV32Config):
    """Config of GLM-5: DeepSeek-V3.2's layers, of which some use an earlier layer's choice of tokens."""

    rms_norm_eps: float = 1e-5
    indexer_types: list[Literal["full", "shared"]] = training_setting(
        "full, or shared for an indexer of an earlier layer, for every layer; default: full",
        default=attrs.Factory(lambda self: [FULL] * self.num_hidden_layers, takes_self=True),
    )

    def mixer_spec_of(self, layer: int) -> Any:
        types = self.indexer_types
        link = f"index {max(n for n in range(layer + 1) if types[n] == FULL)}"
        own = super().mixer_spec_of(layer)
        if types[layer] == SHARED:
            latent = LatentConfig.mixer_spec_of(self, layer)
            return SharedIndexSpec(**attrs.asdict(latent, recurse=False), chosen=own.chosen, link=link)
        return attrs.evolve(
            own,
            index_interleaved=True,
            loss_coef=self.indexer_loss_coef / types[: self.num_hidden_layers].count(FULL),
            link=link if types[layer + 1 : layer + 2] == [SHARED] else "",
        )

    @classmethod
    def find_split_faults(cls, sizes: Settings, dimension: str, ranks: int) -> Iterator[str]:
        yield from super().find_split_faults(sizes, dimension, ranks)
        if dimension == "pipeline" and SHARED in (sizes.get("indexer_types") or ()):
            yield "layers share indexers"

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        yield from super().find_faults(given)
        if (given.get("indexer_types") or [FULL])[0] == SHARED:
            yield InvalidSetting("indexer_types", "the first layer shares no earlier indexer", "begin with 'full'")

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Read which layers share indexers from a list, letters, or a period."""
        given, layers = config.get("indexer_types"), config.get("num_hidden_layers") or 0
        if given is None and (given := config.get("index_topk_pattern")) is None:
            period, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
            given = [SHARED if max(n - offset + 1, 0) % period else FULL for n in range(layers)]
        types = [{"F": FULL, "S": SHARED}.get(kind, kind) for kind in given]
        return super().read_keys({**config, "indexer_types": types})


@component(impact="incompatible")
class GlmMoeDsa(DecoderBuilder):
    """A GLM-5 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = GlmDsaConfig
    model_type = "glm_moe_dsa"
    class_name = "GlmMoeDsaForCausalLM"
    hf_defaults = {
        **Glm4MoeLite.hf_defaults,
        "first_k_dense_replace": 3,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
    }
    has_classifier = False
