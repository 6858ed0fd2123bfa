"""Contracts for ports of devices, meshes and processes."""

from math import prod

import attrs
import torch

from drawloom.components.ports.distributed import Device, Mesh, Neighbours, Precision, Processes, Reduce, ReplicaLimit
from drawloom.graph.testing import expect


def device_allocates_tensors_and_counts_memory(device: Device) -> None:
    """The device can allocate tensors, its backend is gloo or nccl, and its memory in use is at least 0."""
    tensor = torch.zeros(2, device=device.device)
    expect(tensor.device.type == device.device.type, f"a tensor is on {tensor.device}")
    expect(device.backend in ("gloo", "nccl"), f"the backend is {device.backend!r}")
    expect(device.get_peak_memory_so_far() >= 0, f"{device.get_peak_memory_so_far()} bytes are in use")


def dimension_sizes_multiply_to_the_world_size(mesh: Mesh) -> None:
    """The dimension sizes multiply to the world size, and every index is below its size."""
    sizes, indices = attrs.asdict(mesh.sizes), attrs.asdict(mesh.indices)
    dense = mesh.sizes.without_expert_dimensions()
    expect(prod(dense.values()) == mesh.world.size, f"{dense} are not {mesh.world.size} ranks")
    for name, size in sizes.items():
        expect(0 <= indices[name] < size, f"this rank has index {indices[name]} along {name}")


def groups_match_dimensions(mesh: Mesh) -> None:
    """A dimension's group has the dimension's size, and this rank's index is its rank in the group."""
    indices = mesh.indices.without_expert_dimensions()
    for name, size in mesh.sizes.without_expert_dimensions().items():
        group = mesh.group(name)
        expect((group.rank, group.size) == (indices[name], size), f"the group of {name} does not match it")


def all_dtypes_are_floating_point(precision: Precision) -> None:
    """All dtypes are floating-point, and sums over ranks are at least as wide as float32."""
    for name in ("parameter", "compute", "gradient", "reduce"):
        dtype = getattr(precision, name)
        expect(isinstance(dtype, torch.dtype) and dtype.is_floating_point, f"{name} is {dtype}")
    expect(precision.reduce.itemsize >= 4, f"sums are in {precision.reduce}")


def ranks_are_below_their_counts(processes: Processes) -> None:
    """Rank, local rank and node rank are from 0 to below their counts."""
    expect(0 <= processes.rank < processes.world_size, f"rank {processes.rank} is not below {processes.world_size}")
    local = processes.local_rank, processes.local_world_size
    expect(0 <= local[0] < local[1] <= processes.world_size, f"local rank {local[0]} is not below {local[1]}")
    node = processes.node_rank, processes.node_count
    expect(0 <= node[0] < node[1] <= processes.world_size, f"node rank {node[0]} is not below {node[1]}")


def group_has_the_ranks_of_the_set_with_this_rank(processes: Processes) -> None:
    """The group of several sets of ranks is the set that contains this rank, with this rank's index in it."""
    world = list(range(processes.world_size))
    together = processes.make_group("together", [world])
    expect(
        (together.rank, together.size) == (processes.rank, len(world)),
        "the group of all ranks is another",
    )
    alone = processes.make_group("alone", [[rank] for rank in world])
    expect((alone.rank, alone.size) == (0, 1), "the group of one rank is another")
    expect(alone.gather_json({"a": [1, None]}) == [{"a": [1, None]}], "a group of one rank gathers another value")


def work_divides_among_some_number_of_replicas(limit: ReplicaLimit) -> None:
    """The work can be shared by some number of replicas, at least by a single one."""
    expect(any(limit.supports_replica_count(count) for count in range(1, 65)), "no number of replicas fits")


def total_and_maximum_are_at_least_the_local_values(reduce: Reduce) -> None:
    """
    The total and the maximum of nonnegative values keep shape and float64, and are at least this rank's values.

    The total is linear, and the maximum is at most the total.
    """
    values = torch.tensor([1.0, 2.0, 1e-9], dtype=torch.float64)
    total, twice = reduce.sum_over_ranks(values.clone()), reduce.sum_over_ranks(2 * values)
    expect(total.dtype == torch.float64 and total.shape == values.shape, f"the total is {total.dtype} {total.shape}")
    expect(bool((total >= values).all()) and torch.allclose(twice, 2 * total), "the total is not a sum")
    largest = reduce.max_over_ranks(values.clone())
    expect(bool((largest >= values).all() and (largest <= total).all()), "the largest is not a maximum")


def without_edges_there_are_no_channels(neighbours: Neighbours) -> None:
    """There are no channels without edges, because channels lead only to the other ends of edges."""
    channels = neighbours.open_channels([])
    expect(len(channels) == 0, f"there are channels to {sorted(channels)} without an edge")
