"""Mesh sizes for a process count."""

import math
from collections.abc import Callable, Mapping

import attrs

from drawloom import UserError
from drawloom.components.distributed.mesh_layout import Layout, describe_expert_fault_and_remedy


def format_launch_hint(ranks: int) -> str:
    """Return a hint with the command for this many processes."""
    return f"start it with `drawloom launch --nproc-per-node {ranks} run RECIPE`"


def resolve_layout(
    sizes: Mapping[str, int | str], expert: int, world_size: int, remedy: Callable[[int], str] = format_launch_hint
) -> Layout:
    """
    Return the layout for `world_size` ranks; an "auto" dimension's size is `world_size` divided by the other sizes.

    If data_shard is "auto", an "auto" data_replicate is 1.

    Raises UserError if the sizes do not fit, with the `remedy` for a fitting rank count.
    """
    if sizes["data_shard"] == sizes["data_replicate"] == "auto":
        sizes = {**sizes, "data_replicate": 1}
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    product = math.prod(fixed.values())
    if len(fixed) < len(sizes) and world_size % product:
        raise UserError(
            f"the mesh needs a multiple of {_format_sizes(fixed)} = {product} processes, and there are {world_size}; "
            f"{remedy(product)}",
            exit_code=2,
        )
    if len(fixed) == len(sizes) and product != world_size:
        raise UserError(
            f"the mesh {_format_sizes(fixed)} = {product} needs {product} processes, and there are {world_size}; "
            f"{remedy(product)}",
            exit_code=2,
        )
    layout = Layout({name: size if isinstance(size, int) else world_size // product for name, size in sizes.items()})
    if fault := describe_expert_fault_and_remedy(layout.sizes, expert):
        raise UserError("; ".join(fault), exit_code=2)
    return attrs.evolve(layout, expert=expert)


def _format_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes such as `pipeline 2 × tensor 4`, for messages."""
    return " × ".join(f"{name} {size}" for name, size in sizes.items())
