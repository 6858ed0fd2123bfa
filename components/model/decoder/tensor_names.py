"""Mappers for families whose tensors in files have other names, or are joined."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mapper import create_decoder_mapper
from drawloom.components.weights.mapper import parallel
from drawloom.ports import Mapper

CreateMapper = Callable[[Iterable[str], DecoderConfig], Mapper]
"""Function that returns the mapper from parameters with these names to tensors in files."""

MIXTRAL_EXPERTS = {
    r"\.mlp\.(gate|shared_experts|experts)\.": r".block_sparse_moe.\1.",
    r"(\.experts\.\d+)\.gate_proj\.": r"\1.w1.",
    r"(\.experts\.\d+)\.up_proj\.": r"\1.w3.",
    r"(\.experts\.\d+)\.down_proj\.": r"\1.w2.",
}
"""Patterns for files in which experts have Mixtral's names."""


def rename_tensors(patterns: Mapping[str, str], create: CreateMapper = create_decoder_mapper) -> CreateMapper:
    """Return `create` with regular expressions replaced, one after another, in the names of tensors in files."""

    def rename(name: str) -> str:
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        return name

    def create_renaming_mapper(names: Iterable[str], architecture: DecoderConfig) -> Mapper:
        groups = create(names, architecture).groups
        return Mapper(tuple(attrs.evolve(group, outputs=tuple(map(rename, group.outputs))) for group in groups))

    return create_renaming_mapper


def join_tensors(
    join: Callable[[str, Any], Iterable[Mapper]], create: CreateMapper = create_decoder_mapper
) -> CreateMapper:
    """
    Return a function for the mapper to files that join or reshape some parameters.

    `join(name, config)` returns a parameter's mappers, which may read other parameters, too; `create` maps the
    parameters that none of these mappers reads.
    """

    def create_joining_mapper(names: Iterable[str], architecture: DecoderConfig) -> Mapper:
        parameters = list(names)
        joined = parallel(*(mapper for name in parameters for mapper in join(name, architecture)))
        read = set(joined.inputs)
        return parallel(joined, create([name for name in parameters if name not in read], architecture))

    return create_joining_mapper
