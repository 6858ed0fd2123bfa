"""Steps whose numbers reach the host late do not make the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from support.checkpoints import SingleRankMesh
from support.late_steps import OPTIMIZERS, Small

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


@contextmanager
def no_waits() -> Iterator[None]:
    """Make torch raise an error if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_host_does_not_wait_between_backward_and_update(optimizer: str) -> None:
    """A host that does not wait skips the same steps and has the same losses as a host that waits for the norm."""
    mesh: Any = SingleRankMesh()
    device = ComputeDevice(kind="cuda")
    device.open()
    try:
        late = Small(mesh, device, optimizer, "auto", {1, 3}, no_waits).train(5)
        known = Small(mesh, device, optimizer, "exact", {1, 3}).train(5)
    finally:
        device.close()
    assert late.reasons == known.reasons
    assert [bool(reason) for reason in late.reasons] == [True, False, True, False, False]
    assert late.norms == pytest.approx(known.norms, rel=1e-9)
    assert late.losses == pytest.approx(known.losses, rel=1e-5)
