"""The component `model.qwen3_5`: dense Qwen3.5 for text (Qwen team 2026)."""

from collections.abc import Iterator

from drawloom import component
from drawloom.components.model.decoder.declarations import DecoderBuilder, Family
from drawloom.components.model.decoder.hybrid import (
    HYBRID_DEFAULTS,
    HybridConfig,
    join_delta_nets,
    read_hybrid_config,
)
from drawloom.components.model.decoder.mixer_specs import DeltaSpec
from drawloom.components.weights.mapper_ops import concatenate, identity
from drawloom.ports import Mapper


def _join_projections(net: str, delta: DeltaSpec) -> Iterator[Mapper]:
    """Yield the mapper that joins a gated delta net's q, k and v projections."""
    parts = [f"{net}.in_proj_{part}.weight" for part in "qkv"]
    yield concatenate(parts, f"{net}.in_proj_qkv.weight", sizes=delta.channels)


create_qwen3_5_mapper = join_delta_nets(_join_projections, lambda names, _: identity(*names))
"""Function for the mapper to files, where queries, keys and values of gated delta nets are joined."""


@component(impact="incompatible")
class Qwen35(DecoderBuilder):
    """A dense Qwen3.5 language model for text, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        HybridConfig,
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        hf_defaults=HYBRID_DEFAULTS | {"num_key_value_heads": 4},
        derives_head_dim=False,
        nested_types={"qwen3_5": "model."},
        ignored=("mtp.*", "model.visual.*"),
        read=read_hybrid_config,
        mapper=create_qwen3_5_mapper,
    )
