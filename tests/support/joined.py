"""This process as a rank of a mesh, for functions run in several processes by `support.processes`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses


@contextmanager
def join_processes(kind: Any = "cpu", timeout: float = 30.0) -> Iterator[tuple[TorchProcesses, ComputeDevice]]:
    """Yield the launch's processes and this one's device; GPUs are shared where there are too few."""
    device = ComputeDevice(kind=kind, share=True)
    device.open()
    processes = TorchProcesses(device=device, timeout=timeout)
    processes.open()
    try:
        yield processes, device
    finally:
        processes.close()


@contextmanager
def mesh_along(dimension: str) -> Iterator[tuple[RankMesh, ComputeDevice]]:
    """Yield a mesh with all processes along one dimension, and this one's device, a CPU."""
    with join_processes() as (processes, device):
        mesh = RankMesh(processes=processes, **{"data_replicate": 1, dimension: processes.world_size})
        mesh.open()
        yield mesh, device
