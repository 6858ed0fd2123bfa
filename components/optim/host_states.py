"""Where an optimizer's state is: on the device, in host memory (optimizer offload), or parameter by parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

import torch

from drawloom import NodeView, Problem, above, internal, setting
from drawloom.graph import component_base_class
from drawloom.ports import MemoryKind, MemoryPolicy, Mesh, Transfers

SLOTS = 3
"""Slots on the device: of a piece that arrives, one that is updated, and one that leaves."""

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin, in a slot and in host memory."""

DEFAULT_SLOT_BYTES = 2**28

MAX_TENSORS = 8
"""Tensors in a parameter's state, at most; each begins at an aligned address."""


def _open_device_transfers(device: torch.device) -> Transfers:
    from drawloom.components.distributed.transfers import DeviceTransfers  # few runs have state in host memory

    return DeviceTransfers(device)


@component_base_class
class HostStates:
    """Settings for the state's memory, and its bytes on the device and on the host."""

    _cuts_parameters: ClassVar[bool] = False
    """Whether a parameter's state may pass through several slots; otherwise a slot has room for the largest one."""

    mesh: Mesh
    memory: MemoryPolicy | None = None
    states: Literal["device", "host"] = setting(
        "memory for the state: the device's, or pinned memory of the host, which takes time to stream",
        default="device",
        impact="safe",
    )
    slot_bytes: int = setting(
        "bytes of each of three slots on the device, through which a state on the host is streamed",
        default=DEFAULT_SLOT_BYTES,
        impact="safe",
        check=above(0),
    )
    open_transfers: Callable[[torch.device], Transfers] = internal(_open_device_transfers)
    _transfers: Transfers | None = internal(None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Refuse a second choice of the state's memory, and slots through which nothing passes."""
        policy = node.neighbour("memory")
        if node.settings["states"] == "host" and policy:
            yield node.problem("states", f"[{policy.name}] chooses its memory", f"remove it, or [{policy.name}]")
        if node.settings["states"] == "device" and not policy and node.settings["slot_bytes"] != DEFAULT_SLOT_BYTES:
            text = "the state is on the device, so that nothing is streamed through slots"
            yield node.problem("slot_bytes", text, "write states = 'host', or remove slot_bytes")

    def close(self) -> None:
        """Release the host memory."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return the bytes of the state on the device, with the slots for a state in host memory."""
        sizes, on_host = self._count_state_bytes_by_parameter(), self._choose_parameters_with_host_state()
        host = sum(sizes[name] for name in on_host)
        return {"optimizer_state": sum(sizes.values()) - host + SLOTS * self._compute_slot_bytes(on_host)}

    def host_bytes(self) -> int:
        sizes = self._count_state_bytes_by_parameter()
        return sum(sizes[name] for name in self._choose_parameters_with_host_state())

    def _count_state_bytes_by_parameter(self) -> Mapping[str, int]:
        """Return the bytes of the state by parameter."""
        raise NotImplementedError

    def _choose_parameters_with_host_state(self) -> list[str]:
        """Return the parameters whose state is in host memory: the first ones, as many as policy or setting choose."""
        fraction = float(self.states == "host")
        if self.memory is not None:
            fraction = self.memory.choose().host_states[self.mesh.indices.pipeline]
        sizes, names, moved = self._count_state_bytes_by_parameter(), list[str](), 0
        least = fraction * sum(sizes.values())
        for name, size in sizes.items():
            if moved < least:
                names.append(name)
                moved += size
        return names

    def _compute_slot_bytes(self, on_host: list[str]) -> int:
        """Return the bytes of a slot for these parameters' state: no more than their state needs, 0 without any."""
        sizes = self._count_state_bytes_by_parameter()
        rounded = [sizes[name] + MAX_TENSORS * ALIGNMENT for name in on_host]
        size = min(self.slot_bytes, sum(rounded))
        return size if self._cuts_parameters else max(size, *rounded, 0)
