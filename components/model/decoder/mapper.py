"""Mapper from a decoder's parameters to tensors in published files."""

import re
from collections.abc import Iterable

import attrs

from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.weights.mapper import chunk, identity, parallel, sequential, unsqueeze, unstack
from drawloom.ports import Mapper


def create_decoder_mapper(names: Iterable[str], architecture: DecoderConfig, prefix: str | None = None) -> Mapper:
    """Return the mapper from these parameters to files or, with the decoder's prefix, to transformers' modules."""
    join = architecture.join_modules if prefix else architecture.join_tensors
    stacks_experts, patterns = prefix or architecture.stacks_experts, {**architecture.renamed_tensors}
    if prefix:
        patterns |= {**architecture.renamed_modules, r"^model\.": prefix}
    parameters = list(names)
    joined = parallel(*(mapper for name in parameters for mapper in join(name)))
    read = set(joined.inputs)
    layers = range(architecture.num_hidden_layers)
    specs = (branch.spec for layer in layers for branch in architecture.branches_of(layer))
    count = next((spec.experts for spec in specs if isinstance(spec, ExpertSpec)), 0)
    others = (
        identity(name) if stacks_experts and ".experts." in name else _create_parameter_mapper(name, count)
        for name in parameters
        if name not in read
    )

    def rename(name: str) -> str:
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        return name

    groups = parallel(joined, *others).groups
    return Mapper(tuple(attrs.evolve(group, outputs=tuple(map(rename, group.outputs))) for group in groups))


def _create_parameter_mapper(name: str, num_experts: int) -> Mapper:
    """Return the mapper from one parameter to its tensors in files, where experts are separate."""
    layer, _, projection = name.rpartition(".")
    experts = [f"{layer}.{expert}" for expert in range(num_experts)]
    # Experts are stacked in one parameter here, and are separate tensors in published files.
    if name.endswith(".experts.gate_up_proj"):
        parts = [(expert, [f"{expert}.{part}_proj.weight" for part in ("gate", "up")]) for expert in experts]
        return sequential(unstack(name, experts), parallel(*(chunk(expert, names) for expert, names in parts)))
    if name.endswith((".experts.up_proj", ".experts.down_proj")):
        return unstack(name, [f"{expert}.{projection}.weight" for expert in experts])
    if projection in ("conv_q", "conv_k", "conv_v"):  # (channels, taps), and a convolution's (channels, 1, taps)
        return unsqueeze(name, 1)
    return identity(name)
