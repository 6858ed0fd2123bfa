"""The component `model.qwen3_next`: Qwen3-Next (Qwen team 2025)."""

from collections.abc import Iterator

from drawloom import component
from drawloom.components.model.declarations import (
    HYBRID_DEFAULTS,
    DecoderBuilder,
    Family,
    concatenate_blocks,
    config_class,
)
from drawloom.components.model.qwen3.moe import Qwen3MoeConfig
from drawloom.components.model.qwen3_5_moe import Qwen35MoeConfig
from drawloom.ports import ConfigJson, Mapper


@config_class
class Qwen3NextConfig(Qwen35MoeConfig, Qwen3MoeConfig):
    """Config of Qwen3-Next: Qwen3.5's layers, but some may have no experts."""

    stacks_experts = False

    def join_projections(self, net: str) -> Iterator[Mapper]:
        """Yield mappers that join a gated delta net's projections as in files: key head by key head."""
        delta = self.delta
        group = delta.value_heads // delta.key_heads
        rows = {"q": delta.key_dim, "k": delta.key_dim, "v": group * delta.value_dim, "z": group * delta.value_dim}
        for sizes in (rows, {"b": group, "a": group}):
            parts = [f"{net}.in_proj_{part}.weight" for part in sizes]
            target = f"{net}.in_proj_{''.join(sizes)}.weight"
            yield concatenate_blocks(parts, target, delta.key_heads, list(sizes.values()))

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Fill in transformers' intermediate_size, as layers may be dense, and derive missing layer types."""
        return super().read_keys({"intermediate_size": 5632, **config})


@component(impact="incompatible")
class Qwen3Next(DecoderBuilder):
    """A Qwen3-Next language model, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        Qwen3NextConfig,
        "qwen3_next",
        "Qwen3NextForCausalLM",
        hf_defaults=HYBRID_DEFAULTS
        | {
            "num_key_value_heads": 2,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
        },
        derives_head_dim=False,
        ignored=("mtp.*",),
    )
