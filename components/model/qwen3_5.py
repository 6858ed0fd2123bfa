"""The component `model.qwen3_5`: dense Qwen3.5 for text (Qwen team 2026)."""

from collections.abc import Iterable, Iterator
from typing import Any

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.hybrid import (
    HYBRID_DEFAULTS,
    HybridConfig,
    convert_hybrid_config_from_hf,
    find_delta_net_paths,
)
from drawloom.components.ports.recurrence import RecurrentKernels
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import concatenate, identity, unsqueeze
from drawloom.graph import component


def create_joined_convolution_mapper(net: str, config: HybridConfig) -> Mapper:
    """Return the mapper that joins the convolutions of a gated delta net (channels, taps): (channels, 1, taps)."""
    joined, delta = f"{net}.conv1d.weight", config.delta
    sizes = [delta.key_heads * delta.key_dim] * 2 + [delta.value_heads * delta.value_dim]
    return sequential(concatenate([f"{net}.conv_{part}" for part in "qkv"], joined, sizes=sizes), unsqueeze(joined, 1))


def create_qwen3_5_mapper(parameters: Iterable[str], architecture: DecoderConfig) -> Mapper:
    """Return the mapper to files, in which queries, keys and values of gated delta nets are joined."""
    names = list(parameters)
    joined = parallel(
        *(
            mapper
            for net in find_delta_net_paths(names)
            for mapper in _create_joined_projection_mappers(net, architecture)
        )
    )
    return parallel(joined, identity(*(name for name in names if name not in set(joined.inputs))))


def _create_joined_projection_mappers(net: str, config: Any) -> Iterator[Mapper]:
    """Yield mappers that join a gated delta net's q, k and v projections, and its convolutions, as in files."""
    delta = config.delta
    sizes = [delta.key_heads * delta.key_dim] * 2 + [delta.value_heads * delta.value_dim]
    parts = [f"{net}.in_proj_{part}.weight" for part in "qkv"]
    yield concatenate(parts, f"{net}.in_proj_qkv.weight", sizes=sizes)
    yield create_joined_convolution_mapper(net, config)


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
        read=convert_hybrid_config_from_hf,
        mapper=create_qwen3_5_mapper,
    )

    kernels: RecurrentKernels
