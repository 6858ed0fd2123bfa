"""The port of what holds memory from step to step, and the kinds of memory."""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, get_args

from drawloom.graph import port

MemoryKind = Literal["parameters", "masters", "compute_copies", "gradients", "optimizer_state", "workspace"]
"""
What bytes are used for. `parameters` are those that are their own master and compute copy, with buffers; `workspace`
is what a peak has besides all others: activations, temporary tensors, and on a CPU the process itself.
"""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@port
class MemoryUser(Protocol):
    """A node that holds tensors on this rank's device for longer than a step, or gradients."""

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        """
        Bytes of this node on this rank by kind, also of what is allocated in the first step; {} before `open`.

        An optimizer needs no `open`: its bytes follow from the parameters, which may be on the meta device.
        """
        ...


def memory_by_kind(users: Iterable[MemoryUser], peak: int | None = None) -> dict[MemoryKind, int]:
    """Bytes of all users by kind, without kinds that nothing is held of; with a peak, `workspace` is its rest."""
    each = [user.memory_bytes() for user in users]
    known = {kind: sum(held.get(kind, 0) for held in each) for kind in MEMORY_KINDS}
    if peak is not None:
        known["workspace"] += max(0, peak - sum(known.values()))
    return {kind: size for kind, size in known.items() if size}
