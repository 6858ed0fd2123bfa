"""
Memory of equal size on every rank in a group, readable and writable by the whole group.

On GPUs it is torch's symmetric memory, reached by one host's GPUs over NVLink or PCIe; on a CPU, a file mapped by the
host's processes.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.single_process import HostMemory
from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError


@attrs.frozen(eq=False)
class GpuMemory:
    """GPUs' symmetric memory, by torch; `barrier` is a kernel on the current stream."""

    parts: Sequence[Tensor]
    handle: Any

    def barrier(self) -> None:
        self.handle.barrier()


def allocate_symmetric_gpu_memory(size: int, group: Any, device: torch.device) -> GpuMemory:
    """
    Allocate `size` bytes on every rank in a torch.distributed group; a collective.

    Raises UserError if the GPUs can't map each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    try:
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        # torch zeroes the memory and the signals of its barrier in the default stream, for which other streams do not
        # wait: on a busy GPU a late zero would erase the signal of a rank that is already there.
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(own, group)
        parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))]
    except RuntimeError as error:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise UserError(
            f"the GPUs of ranks {ranks} can't map each other's memory; they must be on one host, with peer access. "
            f"torch says: {str(error).strip().splitlines()[0]}"
        ) from error
    return GpuMemory(parts, handle)


def allocate_shared_host_memory(size: int, group: Group) -> HostMemory:
    """
    Allocate `size` bytes for every rank in a group, in a temporary file without a name; a collective.

    Raises UserError if the ranks are not on one host, or the disk is full.
    """
    path = Path(group.gather_json(_create_preallocated_file(size * group.size) if group.rank == 0 else "")[0])
    sees_file = group.gather_json(path.exists() and path.stat().st_size == size * group.size)
    if not all(sees_file):
        raise UserError(
            f"rank {sees_file.index(False)} of the group can't share memory with rank 0 by {path}; the ranks must be "
            f"on one host, with {size * group.size} bytes free there"
        )
    whole = torch.from_file(str(path), shared=True, size=size * group.size, dtype=torch.uint8)
    group.gather_json(None)  # all have mapped the file
    if group.rank == 0:
        path.unlink()
    return HostMemory(torch.split(whole, size), group)


def _create_preallocated_file(size: int) -> str:
    """Create a temporary file and return its path; the file is empty if the disk has no room for `size` bytes."""
    descriptor, path = tempfile.mkstemp(prefix="drawloom-memory-")
    try:
        # Allocate space now, because a full disk would later kill the processes by a signal.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
    return path
