"""Memory kinds, and ports for nodes that occupy memory from step to step, or choose what occupies it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import attrs
from torch import Tensor

from drawloom.components.ports.stages import Recompute
from drawloom.graph import port

MemoryKind = Literal["parameters", "masters", "compute_copies", "gradients", "optimizer_state", "workspace"]
"""
The use of bytes. `parameters` are buffers and parameters that are both master weight and compute copy; `workspace` is
the part of a peak beyond all other kinds: activations, temporary tensors, and on a CPU the process itself.
"""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@port
class MemoryUser(Protocol):
    """A node that keeps gradients, or tensors for longer than a step, on this rank's device."""

    def device_bytes(self) -> Mapping[MemoryKind, int]:
        """
        Return this node's bytes on this rank by kind, including bytes allocated in the first step; {} before `open`.

        An optimizer answers before `open`: its bytes follow from the parameters, which may be on the meta device.
        """


@runtime_checkable
class HostMemoryUser(Protocol):
    """A memory user with tensors in host memory, which are streamed to the device and back in every step."""

    def host_bytes(self) -> int:
        """Return the bytes in host memory on this rank; like `device_bytes`, before `open`."""


def sum_memory_by_kind(users: Iterable[MemoryUser], peak: int | None = None) -> dict[MemoryKind, int]:
    """Sum all users' bytes by kind, without empty kinds; with a peak, `workspace` is the remainder."""
    bytes_by_user = [user.device_bytes() for user in users]
    totals = {kind: sum(by_kind.get(kind, 0) for by_kind in bytes_by_user) for kind in MEMORY_KINDS}
    if peak is not None:
        totals["workspace"] += max(0, peak - sum(totals.values()))
    return {kind: size for kind, size in totals.items() if size}


Ticket = Any
"""A point in a stream of copies or computation, from `Transfers`; None is the past."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a target and a source of equal shape and dtype."""


class Transfers(Protocol):
    """
    Asynchronous copies between a device and host memory (offload).

    Copies in one direction are made in order, each after the tickets in `after`. Neither the host nor the device's
    computation waits for a copy, except in `make_computation_wait` and `synchronize`; memory may be reused only after
    its copies.
    """

    def allocate_pinned_host_memory(self, size: int) -> Tensor:
        """Return zeros in host memory, uint8 (size,), which is pinned if the device is a GPU."""

    def copy_to_device(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy tensors from host memory to the device, and return the ticket of the last copy's end."""

    def copy_to_host(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy tensors from the device to host memory, and return the ticket of the last copy's end."""

    def mark_computation(self) -> Ticket:
        """Return a ticket that copies can wait for: all computation issued so far is done."""

    def make_computation_wait(self, ticket: Ticket) -> None:
        """Make computation issued from now on wait for a ticket; the host does not wait."""

    def synchronize(self) -> None:
        """Let the host wait for all copies."""

    def close(self) -> None:
        """Wait for all copies, and release the memory."""


@attrs.frozen
class MemoryChoice:
    """
    A run's memory use: recompute policies by stage (activation checkpointing), the stages whose activations wait in
    host memory, and by pipeline rank the fraction of the optimizer's state in host memory, from 0 to 1.
    """

    recompute: tuple[Recompute, ...]
    offloaded: frozenset[int]
    host_states: tuple[float, ...]

    @classmethod
    def keep_all(cls, stages: int, ranks: int) -> "MemoryChoice":
        """Return the choice to keep everything on the device, for these numbers of stages and pipeline ranks."""
        nothing: Recompute = "none"
        return cls((nothing,) * stages, frozenset(), (0.0,) * ranks)


@port
class MemoryPolicy(Protocol):
    """Chooses what a run keeps on the device, in place of settings."""

    def choose(self) -> MemoryChoice:
        """
        Return the choice for this run, before stages allocate. Ranks may choose differently: results do not change,
        unless the recompute policy is "quantized".

        Raises UserError if the run can't be planned.
        """
