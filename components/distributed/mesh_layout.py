"""
Rank numbering in a mesh: row-major in (pipeline, data_replicate, data_shard, context, tensor).

Expert parallelism has no ranks of its own: it arranges a pipeline stage's consecutive ranks as (expert_replicate,
expert_shard, expert) instead of (data_replicate, data_shard, context, tensor).
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from drawloom.ports import DIMENSIONS, Group, P2PChannel, PerDimension

EXPERT_DIVIDES = DIMENSIONS[1:]
SAME_REPLICA = DIMENSIONS[2:]

SHARDS = ("data_shard", "context")
DATA = ("data_replicate", *SHARDS)
MODEL = ("pipeline", "expert_shard", "expert")
EXPERT_DATA = ("expert_replicate", "expert_shard")
DATA_TENSOR = (*DATA, "tensor")


@attrs.frozen
class Layout:
    """Sizes by dimension, in order, and the number of ranks with a share of a layer's experts."""

    sizes: Mapping[str, int]
    expert: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    def list_rank_sets(self, *dimensions: str) -> list[list[int]]:
        """Return sets of ranks that differ only in their indices along these dimensions, in ascending order."""
        sizes = self.sizes if self.sizes.keys() >= set(dimensions) else self.expert_sizes
        grid = np.arange(self.world_size).reshape([*sizes.values()])
        axes = [axis for axis, name in enumerate(sizes) if name in dimensions]
        moved = np.moveaxis(grid, axes, range(-len(axes), 0))
        return list(moved.reshape(-1, math.prod(sizes[name] for name in dimensions)).tolist())

    @property
    def expert_sizes(self) -> dict[str, int]:
        """
        The expert dimensions' sizes over the same ranks.

        Ranks along `expert_replicate` have the same parameters: `expert_shard` × `expert` ranks are the fewest whole
        replicas divisible by `expert`.
        """
        replica = math.prod(self.sizes[name] for name in SAME_REPLICA)
        shards = replica // math.gcd(replica, self.expert)
        replicas = self.sizes["data_replicate"] * replica // (shards * self.expert)
        others = {name: size for name, size in self.sizes.items() if name not in EXPERT_DIVIDES}
        return others | {"expert_replicate": replicas, "expert_shard": shards, "expert": self.expert}

    @property
    def sizes_with_experts(self) -> PerDimension:
        """The rank count by dimension."""
        return PerDimension(**self.expert_sizes | {**self.sizes})

    def indices(self, rank: int) -> PerDimension:
        """Return a rank's index by dimension."""
        dense, experts = (_unravel_rank(rank, sizes) for sizes in (self.sizes, self.expert_sizes))
        return PerDimension(**experts | dense)


class MeshView:
    """Mesh with a layout, seen from one rank."""

    layout: Layout

    @property
    def rank(self) -> int:
        """This rank's index among all ranks, from 0."""
        raise NotImplementedError

    def group(self, *dimensions: str) -> Group:
        """Return the ranks with this rank's indices along all other dimensions, as a group."""
        raise NotImplementedError

    def open_channels(self, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        """Return no channels, as in a mesh without processes."""
        return {}

    @cached_property
    def world(self) -> Group:
        return self.group(*DIMENSIONS)

    @property
    def replica_group(self) -> Group:
        return self.group("expert_replicate" if self.layout.expert > 1 else "data_replicate")

    @property
    def pipeline_group(self) -> Group:
        return self.group("pipeline")

    @property
    def context_group(self) -> Group:
        return self.group("context")

    @property
    def tensor_group(self) -> Group:
        return self.group("tensor")

    @property
    def expert_group(self) -> Group:
        return self.group("expert")

    @property
    def data_group(self) -> Group:
        return self.group(*DATA)

    @property
    def shard_group(self) -> Group:
        return self.group(*SHARDS)

    @property
    def model_copy_group(self) -> Group:
        """The ranks that together contain one model copy: all dimensions except `expert_replicate`."""
        return self.group(*MODEL)

    @property
    def expert_data_group(self) -> Group:
        return self.group(*EXPERT_DATA)

    @property
    def data_tensor_group(self) -> Group:
        return self.group(*DATA_TENSOR)

    def ranks(self, *dimensions: str) -> list[int]:
        """Return the ranks in this rank's group along these dimensions, in ascending order."""
        return next(ranks for ranks in self.layout.list_rank_sets(*dimensions) if self.rank in ranks)

    @property
    def sizes(self) -> PerDimension:
        return self.layout.sizes_with_experts

    @property
    def indices(self) -> PerDimension:
        return self.layout.indices(self.rank)


def _unravel_rank(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's index along every dimension; the last dimension's index changes fastest."""
    indices = np.unravel_index(rank, [*sizes.values()])
    return dict(zip(sizes, map(int, indices), strict=True))


def describe_expert_fault_and_remedy(sizes: Mapping[str, Any], expert: int) -> tuple[str, str] | None:
    """Return the reason why `expert` does not fit a mesh with these sizes, and the remedy; None if it fits."""
    if "auto" in (sizes["data_replicate"], sizes["data_shard"]):  # some number of ranks fits
        return None
    ranks = math.prod(sizes[name] for name in EXPERT_DIVIDES)
    if ranks % expert == 0:
        return None
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    text = f"expert = {expert} does not divide {' × '.join(EXPERT_DIVIDES)} = {ranks}"
    return text, f"write {'one of ' if ranks > 1 else ''}{', '.join(divisors)}"
