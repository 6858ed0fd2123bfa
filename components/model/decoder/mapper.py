"""Mapper from a decoder's parameters to tensors in published files."""

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.weights.mapper import (
    chunk,
    concatenate_blocks,
    identity,
    parallel,
    sequential,
    unsqueeze,
    unstack,
)
from drawloom.ports import Mapper

InsertedDims = Mapping[str, tuple[int, ...]]

TAP_DIMS = dict.fromkeys(("conv_q", "conv_k", "conv_v", "taps"), (1,))
"""A convolution has the shape (channels, taps) here, and (channels, 1, taps) in files."""


@attrs.frozen
class Join:
    """
    Tensor `target` in files that joins one module's parameters along the first dimension.

    `pattern` with one of the `names` in it is a parameter's last name. With several `blocks` all parameters' first
    blocks come first, then their second blocks, and so on.
    """

    target: str
    pattern: str
    names: Sequence[str]
    blocks: int = 1


def create_decoder_mapper(
    parameters: Mapping[str, Tensor], architecture: DecoderConfig, prefix: str | None = None
) -> Mapper:
    """Return the mapper from these parameters to files or, with the decoder's prefix, to transformers' modules."""
    joins, patterns = architecture.joins, {**architecture.renamed_tensors}
    inserted_dims = {**TAP_DIMS, **architecture.inserted_dims}
    if prefix:
        joins = architecture.joins_of_modules or joins
        patterns |= {**architecture.renamed_modules, r"^model\.": prefix}
    joined = parallel(*(mapper for join in joins for mapper in _join_parts(parameters, join, inserted_dims)))
    read = set(joined.inputs)
    layers = range(0 if prefix or architecture.stacks_experts else architecture.num_hidden_layers)
    specs = (branch.spec for layer in layers for branch in architecture.branches_of(layer))
    count = next((spec.num_experts for spec in specs if isinstance(spec, ExpertSpec)), 0)
    others = (
        architecture.map_experts(name) or _map_parameter(name, inserted_dims, count)
        for name in parameters
        if name not in read
    )

    def rename(name: str) -> str:
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        return name

    groups = parallel(joined, *others).groups
    return Mapper(tuple(attrs.evolve(group, outputs=tuple(map(rename, group.outputs))) for group in groups))


def _join_parts(parameters: Mapping[str, Tensor], join: Join, inserted_dims: InsertedDims) -> Iterator[Mapper]:
    """Yield a join's mapper for every module with its parts."""
    parts = [join.pattern.format(name) for name in join.names]
    dims = inserted_dims.get(parts[0], ())
    for module in [name.removesuffix(f".{parts[0]}") for name in parameters if name.endswith(f".{parts[0]}")]:
        names, target = [f"{module}.{part}" for part in parts], f"{module}.{join.target}"
        sizes = [len(parameters[name]) // join.blocks for name in names]
        yield sequential(
            concatenate_blocks(names, target, join.blocks, sizes), *(unsqueeze(target, dim) for dim in dims)
        )


def _map_parameter(name: str, inserted_dims: InsertedDims, num_experts: int) -> Mapper:
    """Return the mapper from one parameter to its tensors in files with `num_experts` separate experts."""
    layer, _, projection = name.rpartition(".")
    experts = [f"{layer}.{expert}" for expert in range(num_experts)]
    # Experts are stacked in one parameter here.
    if experts and name.endswith(".experts.gate_up_proj"):
        parts = [(expert, [f"{expert}.{part}_proj.weight" for part in ("gate", "up")]) for expert in experts]
        return sequential(unstack(name, experts), parallel(*(chunk(expert, names) for expert, names in parts)))
    if experts and name.endswith((".experts.up_proj", ".experts.down_proj")):
        return unstack(name, [f"{expert}.{projection}.weight" for expert in experts])
    dims = inserted_dims.get(projection, ())
    return sequential(*(unsqueeze(name, dim) for dim in dims)) if dims else identity(name)
