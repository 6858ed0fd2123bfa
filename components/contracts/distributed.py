"""Contracts for ports of devices, meshes and processes."""

from drawloom.graph.testing import expect
from drawloom.ports import ReplicaLimit


def work_divides_among_some_number_of_replicas(limit: ReplicaLimit) -> None:
    """The work can be shared by some number of replicas, at least by a single one."""
    expect(any(limit.supports_replica_count(count) for count in range(1, 65)), "no number of replicas fits")
