"""Copies between a device and host memory."""

import pytest
import torch

from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.graph import UserError
from support.kernels import DEVICE


def test_a_round_trip_through_the_device_keeps_bytes() -> None:
    """Host memory begins as zeros, arrives on the device, and returns after the tickets that a copy waits for."""
    transfers = DeviceTransfers(DEVICE)
    first, second = transfers.allocate_pinned_host_memory(3000).view(3, 1000).unbind()[:2]
    assert not first.any() and first.is_pinned() == (DEVICE.type == "cuda")
    first.copy_(torch.arange(1000) % 251)
    on_device = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    arrived = transfers.copy_to_device([(on_device, first)], [transfers.mark_computation()])
    transfers.make_computation_wait(arrived)
    on_device += 1
    transfers.copy_to_host([(second, on_device)], [transfers.mark_computation()])
    transfers.synchronize()
    assert torch.equal(second, first + 1)
    transfers.close()


def test_more_than_the_memory_of_the_host_is_refused() -> None:
    """The error has both sizes, and names all that may wait there, before anything is allocated."""
    words = r"1000000000.0 GB do not fit into the host's memory, .* \(optimizer.states, frozen_weights.streamed, or "
    with pytest.raises(UserError, match=words):
        DeviceTransfers(torch.device("cpu")).allocate_pinned_host_memory(10**18)
