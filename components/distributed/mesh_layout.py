"""The numbering of ranks in a mesh: row-major in (pipeline, data_replicate, data_shard, context, tensor)."""

import math
from collections.abc import Mapping

import attrs
import numpy as np

from drawloom.graph import UserError

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "context", "tensor")


@attrs.frozen
class Layout:
    """Sizes by dimension, in order. `expert` divides the ranks of a pipeline stage again, consecutive ranks first."""

    sizes: Mapping[str, int]
    expert: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    def sets(self, *dimensions: str) -> list[list[int]]:
        """The sets of ranks that differ only in their indices along these dimensions, each in ascending order."""
        grid = np.arange(self.world_size).reshape([*self.sizes.values()])
        if dimensions == ("expert",):
            return list(grid.reshape(-1, self.expert).tolist())
        axes = [axis for axis, name in enumerate(self.sizes) if name in dimensions]
        moved = np.moveaxis(grid, axes, range(-len(axes), 0))
        return list(moved.reshape(-1, math.prod(self.sizes[name] for name in dimensions)).tolist())

    def size(self, dimension: str) -> int:
        """The number of ranks along a dimension."""
        return self.expert if dimension == "expert" else self.sizes[dimension]

    def index(self, dimension: str, rank: int) -> int:
        """The index of a rank along a dimension."""
        return next(ranks.index(rank) for ranks in self.sets(dimension) if rank in ranks)


def resolve_shape(sizes: Mapping[str, int | str], expert: int, world_size: int) -> Layout:
    """
    The layout of `world_size` ranks; a dimension of size "auto" is `world_size` divided by the others.

    Raises UserError if the sizes do not fit.
    """
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    product = math.prod(fixed.values())
    if len(fixed) < len(sizes) and world_size % product:
        raise UserError(
            f"the mesh needs a multiple of {_written(fixed)} = {product} processes, and there are {world_size}; "
            f"start it with {command(product)}",
            exit_code=2,
        )
    if len(fixed) == len(sizes) and product != world_size:
        raise UserError(
            f"the mesh {_written(fixed)} = {product} needs {product} processes, and there are {world_size}; "
            f"start it with {command(product)}",
            exit_code=2,
        )
    layout = Layout({name: size if isinstance(size, int) else world_size // product for name, size in sizes.items()})
    return with_expert(layout, expert)


def with_expert(layout: Layout, expert: int) -> Layout:
    """The layout with expert parallelism; a UserError if `expert` does not divide the ranks of a pipeline stage."""
    ranks = layout.world_size // layout.sizes["pipeline"]
    if ranks % expert:
        raise UserError(
            f"expert = {expert} does not divide data_replicate × data_shard × context × tensor = {ranks}; "
            f"write one of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
            exit_code=2,
        )
    return attrs.evolve(layout, expert=expert)


def command(world_size: int) -> str:
    """The command line that starts this many processes."""
    return f"`torchrun --nproc-per-node {world_size} -m drawloom run RECIPE`"


def _written(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in sizes.items())
