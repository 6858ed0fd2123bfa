"""Copies between a device and host memory, on streams of their own, ordered by events."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError, internal
from drawloom.ports import Copies, Ticket

MIN_SLAB_BYTES = 2**26
"""
Size from which memory is pinned where it is: torch's allocator of pinned memory would round it up to a power of two.
Smaller memory may share pages with other memory, which can't be pinned twice; from 32 MiB on, glibc maps pages.
"""

KEEP_ON_DEVICE = "keep more on the device (optimizer.states, frozen_weights.streamed, or pipeline.offloaded)"


@attrs.define(eq=False)
class DeviceTransfers:
    """
    Transfers for one device: a stream for copies to it, and one for copies from it, so both directions overlap.

    Tickets are CUDA events. On a CPU copies are made at once, and tickets are None.
    """

    device: torch.device
    _streams: dict[str, Any] = internal(factory=dict)
    _registered: list[Tensor] = internal(factory=list)

    def allocate_pinned_host_memory(self, size: int) -> Tensor:
        if size > (total := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise UserError(
                f"{size / 1e9:.1f} GB do not fit into the host's memory, {total / 1e9:.1f} GB; use more ranks, or "
                f"{KEEP_ON_DEVICE}"
            )
        pins = self.device.type == "cuda" and size > 0
        if not pins or size < MIN_SLAB_BYTES:
            return torch.zeros(size, dtype=torch.uint8, pin_memory=pins)
        memory = _allocate_zeros_in_huge_pages(size)
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(cudart.cudaHostRegister(memory.data_ptr(), size, 0)):
            raise UserError(
                f"{size / 1e9:.1f} GB of host memory can't be pinned (CUDA error {code}); free memory of this "
                f"host, raise `ulimit -l`, or {KEEP_ON_DEVICE}"
            )
        self._registered.append(memory)
        return memory

    def copy_to_device(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        return self._issue_copies("fetch", copies, after)

    def copy_to_host(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        return self._issue_copies("store", copies, after)

    def mark_computation(self) -> Ticket:
        return None if self.device.type == "cpu" else torch.cuda.current_stream(self.device).record_event()

    def make_computation_wait(self, ticket: Ticket) -> None:
        if ticket is not None:
            torch.cuda.current_stream(self.device).wait_event(ticket)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for all copies, and unpin the memory of `allocate_pinned_host_memory`."""
        self.synchronize()
        for memory in self._registered:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
        self._registered.clear()
        self._streams.clear()

    def _issue_copies(self, direction: str, copies: Copies, after: Sequence[Ticket]) -> Ticket:
        """Issue copies on the stream for a direction, after the tickets, and return the last copy's ticket."""
        if self.device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return None
        stream = self._streams.get(direction)
        if stream is None:
            self._streams[direction] = stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for ticket in after:
            if ticket is not None:
                stream.wait_event(ticket)
        with torch.cuda.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


def _allocate_zeros_in_huge_pages(size: int) -> Tensor:
    """
    Return zeros, uint8 (size,), in pages of 2 MiB if the kernel has such pages.

    All threads create the pages. CUDA's pinning would create pages of 4 KiB, one after another.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pages") as threads:
        parts = torch.split(memory, MIN_SLAB_BYTES)
        list(threads.map(lambda part: ctypes.memset(part.data_ptr(), 0, part.numel()), parts))
    return memory
