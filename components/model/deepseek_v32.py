"""The component `model.deepseek_v32`: DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv 2512.02556)."""

from collections.abc import Iterator

import attrs

from drawloom import at_least, component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    SparseLatentSpec,
    size_setting,
    training_setting,
)
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.glm4_moe_lite import Glm4MoeLiteConfig
from drawloom.ports import Settings


class DeepseekV32Config(Glm4MoeLiteConfig):
    """Config of DeepSeek-V3.2: latent attention to tokens chosen by an indexer."""

    unused_keys = ("rope_interleave",)
    maxima = (*Glm4MoeLiteConfig.maxima, ("head_dim", "index_head_dim"))

    q_lora_rank: int = size_setting("hidden_size", "width of the latent of queries", default=1536)
    index_topk: int = size_setting(
        "max_position_embeddings",
        "number of tokens that the indexer chooses for a token",
        default=2048,
        impact="changes_training",
    )
    index_n_heads: int = size_setting("num_attention_heads", "number of the indexer's heads", default=64)
    index_head_dim: int = size_setting("head_dim", "width of the indexer's heads", default=128)
    indexer_loss_coef: float = training_setting(
        "coefficient of the indexer's loss, a mean over layers; 0: it does not learn", default=1.0, check=at_least(0)
    )
    indexer_warmup: bool = training_setting("attend to all tokens while the indexer learns", default=False)

    def mixer_spec_of(self, layer: int) -> SparseLatentSpec:
        return SparseLatentSpec.from_config(
            self,
            **attrs.asdict(super().mixer_spec_of(layer), recurse=False),
            chosen=None if self.indexer_warmup else self.index_topk,
            loss_coef=self.indexer_loss_coef / self.num_hidden_layers,
        )

    @classmethod
    def find_split_faults(cls, sizes: Settings, dimension: str, ranks: int) -> Iterator[str]:
        yield from super().find_split_faults(sizes, dimension, ranks)
        if dimension == "context":
            yield "the indexer chooses among all tokens of a row"


@component(impact="incompatible")
class DeepseekV32(DecoderBuilder):
    """A DeepSeek-V3.2 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = DeepseekV32Config
    model_type = "deepseek_v32"
    class_name = "DeepseekV32ForCausalLM"
    hf_defaults = {**DeepseekV3.hf_defaults, "max_position_embeddings": 163_840}
    has_classifier = False
