"""
Process group of several processes, with torch's collectives.

Symmetric memory on GPUs is torch's, reached by one host's GPUs over NVLink or PCIe; on a CPU, it is a file mapped by
the host's processes.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import finalize

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from drawloom import UserError
from drawloom.components.distributed.device import SYMMETRIC_BYTES
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.single_process import HostMemory
from drawloom.ports import Group, Pending, SymmetricMemory


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
            f"torch says: {read_first_line(error)}"
        ) from error
    memory = GpuMemory(parts, handle)
    SYMMETRIC_BYTES[device] += size
    finalize(memory, SYMMETRIC_BYTES.subtract, {device: size})
    return memory


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


# torch 2.13 has new names, and warns of the old ones.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def call_directly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function, and return its result."""
    return function(*arguments, **named)


class TorchGroup:
    """
    Group with several processes, in torch.distributed.

    `name` and `ranks` appear in messages. Tensors on other devices than the backend's `device` are copied there and
    back. If a process fails or dies, the others raise a UserError that names it, with the help of the monitor. `call`
    calls a blocking function of torch with its arguments.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        handle: Any,
        device: torch.device,
        monitor: RankMonitor | None = None,
        call: Callable[..., Any] = call_directly,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._handle = handle
        self.device = device
        self._monitor = monitor or RankMonitor()
        self._call = call

    @property
    def rank(self) -> int:
        return dist.get_rank(self._handle)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.SUM)

    def start_sum(self, tensor: Tensor) -> Pending:
        with self._mark_blocked_and_convert_errors("an all-reduce"):
            return TorchWork(self, "an all-reduce", dist.all_reduce(tensor, group=self._handle, async_op=True))

    def max(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.MAX)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: int) -> None:
        sent = tensor.detach().to(self.device).contiguous()
        with self._mark_blocked_and_convert_errors("a broadcast"):
            self._call(dist.broadcast, sent, group=self._handle, group_src=source)
            self._copy_result_back(sent, tensor)

    def gather_json(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.gather_unequal_shapes(text)]

    def gather(self, tensor: Tensor) -> Tensor:
        moved = tensor.detach().to(self.device).contiguous()
        # Flattened, because gloo joins tensors along their first dimension, and a scalar has none.
        gathered = moved.new_empty(self.size * moved.numel())
        with self._mark_blocked_and_convert_errors("an all-gather"):
            self._call(ALL_GATHER, gathered, moved.view(-1), group=self._handle)
            return self._move_result(gathered.view(self.size, *tensor.shape), tensor.device)

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        return gathered, self._start(ALL_GATHER, "an all-gather", gathered, tensor)

    def gather_unequal_shapes(self, tensor: Tensor) -> Sequence[Tensor]:
        # Two collectives, the shapes first, because all_gather needs tensors of equal size.
        shapes = self.gather(torch.tensor(tensor.shape, dtype=torch.int64)).tolist()
        sizes = [math.prod(shape) for shape in shapes]
        padded = F.pad(tensor.detach().reshape(-1), (0, max(sizes) - tensor.numel()))
        parts = zip(self.gather(padded), sizes, shapes, strict=True)
        return [part[:size].view(shape) for part, size, shape in parts]

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        moved = parts.detach().to(self.device).contiguous()
        output = torch.empty_like(moved[0])
        with self._mark_blocked_and_convert_errors("a reduce-scatter"):
            self._call(REDUCE_SCATTER, output.view(-1), moved.view(-1), group=self._handle)
            return self._move_result(output, parts.device)

    def start_reduce_scatter(self, parts: Tensor) -> tuple[Tensor, Pending]:
        output = torch.empty_like(parts[0])
        return output, self._start(REDUCE_SCATTER, "a reduce-scatter", output, parts)

    def _start(self, collective: Callable[..., Any], operation: str, output: Tensor, tensor: Tensor) -> Pending:
        """Start a collective from a tensor to a contiguous output."""
        with self._mark_blocked_and_convert_errors(operation):
            sent = tensor.detach().contiguous().view(-1)
            work = collective(output.view(-1), sent, group=self._handle, async_op=True)
        return TorchWork(self, operation, work)

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> Pending:
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        with self._mark_blocked_and_convert_errors("a shift"):
            operations = [
                dist.P2POp(dist.isend, sent, group=self._handle, tag=distance, group_peer=to),
                dist.P2POp(dist.irecv, received, group=self._handle, tag=distance, group_peer=source),
            ]
            return TorchWork(self, "a shift", _Works(dist.batch_isend_irecv(operations)))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        moved = rows.detach().to(self.device).contiguous()
        output = moved.new_empty(sum(received), *moved.shape[1:])
        with self._mark_blocked_and_convert_errors("an all-to-all"):
            self._call(dist.all_to_all_single, output, moved, list(received), list(sent), group=self._handle)
            return self._move_result(output, rows.device)

    @property
    def may_break(self) -> bool:
        return self._monitor.on_loss is not None

    def raise_if_broken(self) -> None:
        if self._monitor.is_broken:
            raise UserError(f"{self._monitor.describe_lost_ranks()}; rank {self._monitor.rank} repeats its step")

    def wait_and_raise_if_broken(self) -> None:
        if self.may_break and self.device.type == "cuda":
            with self._mark_blocked_and_convert_errors("its GPU's work"):
                torch.cuda.synchronize(self.device)
                self._raise_if_results_are_wrong()
        self.raise_if_broken()

    def allocate_symmetric_memory(self, size: int) -> SymmetricMemory:
        if self.may_break and self.device.type == "cuda":
            raise UserError(
                "kernels reading other GPUs' memory do not end when a rank is lost; write "
                "processes.on_failure = 'stop', or for experts dispatcher.use = 'experts.all_to_all'",
                exit_code=2,
            )
        with self._mark_blocked_and_convert_errors("a mapping of memory"):
            return (
                allocate_symmetric_gpu_memory(size, self._handle, self.device)
                if self.device.type == "cuda"
                else allocate_shared_host_memory(size, self)
            )

    @property
    def handle(self) -> Any:
        """torch.distributed's process group."""
        return self._handle

    def _mark_blocked_and_convert_errors(self, operation: str) -> AbstractContextManager[None]:
        """Mark this rank as blocked in `operation`, and convert torch's errors to a UserError."""
        return mark_blocked_and_convert_errors(self._monitor, operation, self.name, self.ranks)

    @torch.no_grad()
    def _all_reduce(self, tensor: Tensor, operation: Any) -> None:
        """All-reduce a tensor in place, through a copy if it has gaps or is on another device."""
        # a tensor on another device, or with gaps, is reduced as a copy and written back
        reduced = tensor.detach().to(self.device).contiguous()
        with self._mark_blocked_and_convert_errors("an all-reduce"):
            self._call(dist.all_reduce, reduced, operation, group=self._handle)
            self._copy_result_back(reduced, tensor)

    def _copy_result_back(self, changed: Tensor, tensor: Tensor) -> None:
        """Copy a collective's result `changed` into the original `tensor`, unless they share memory."""
        if changed.data_ptr() != tensor.data_ptr() or changed.device != tensor.device:
            tensor.copy_(self._move_result(changed, tensor.device))

    def _move_result(self, result: Tensor, device: torch.device) -> Tensor:
        """Return a collective's result on another device. Raises UserError if a lost rank has made it invalid."""
        moved = result.to(device)
        if self.device.type == "cuda" and moved.device != result.device:  # the host has waited for the GPU
            self._raise_if_results_are_wrong()
        return moved

    def _raise_if_results_are_wrong(self) -> None:
        """
        Raise UserError if any rank has published a loss; call this after waiting for the GPU.

        Aborted kernels also send wrong results to ranks without a notice of the loss, but never before it is published.
        """
        if self.may_break and self._monitor.find_published_loss():
            self.raise_if_broken()


@attrs.frozen(eq=False)
class _Works:
    """A shift's transfers; NCCL joins them."""

    works: Sequence[Any]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@attrs.frozen(eq=False)
class TorchWork:
    """A pending collective in a torch.distributed group; `operation` is its name in messages."""

    group: TorchGroup
    operation: str
    work: Any

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        with self.group._mark_blocked_and_convert_errors(self.operation):
            self.work.wait()


@contextmanager
def mark_blocked_and_convert_errors(
    monitor: RankMonitor, operation: str, name: str, ranks: Sequence[int]
) -> Iterator[None]:
    """Mark this rank as blocked in a group's operation, and convert torch's errors to a UserError with a diagnosis."""
    with monitor.mark_blocked(operation, name):
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            collective = f"{operation} in group {name} (ranks {', '.join(map(str, ranks))})"
            raise _begin_recovery_and_diagnose(error, collective, monitor) from error


def read_first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def convert_if_collective_error(error: Exception, monitor: RankMonitor) -> Exception:
    """
    Return a UserError with a diagnosis for a gloo or NCCL error in collectives without a Group, such as FSDP's, else
    `error`.
    """
    is_collective = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
    return _begin_recovery_and_diagnose(error, "a collective", monitor) if is_collective else error


def _begin_recovery_and_diagnose(error: Exception, operation: str, monitor: RankMonitor) -> UserError:
    """
    Mark this rank as recovering, declare awaited ranks lost after a timeout, and return a UserError with the ranks to
    blame, or a guess, and torch's message. Takes about a second.
    """
    monitor.is_recovering = True
    message = read_first_line(error)
    if monitor.on_loss is not None and "imed out" in message:  # gloo: Timed out, NCCL: timed out
        monitor.declare_awaited_ranks_lost()
    cause = monitor.describe_ranks_to_blame() or "most likely another process stopped"
    return UserError(f"{operation} failed on rank {monitor.rank}: {cause}; see its log. torch says: {message}")
