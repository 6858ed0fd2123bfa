"""What every device is."""

import torch

from drawloom.components.ports.distributed import Device
from drawloom.graph.testing import expect


def tensors_live_there(device: Device) -> None:
    """A tensor can be made on it, and it is known how ranks talk and how much is in use."""
    tensor = torch.zeros(2, device=device.device)
    expect(tensor.device.type == device.device.type, f"a tensor is on {tensor.device}")
    expect(device.backend in ("gloo", "nccl"), f"ranks talk by {device.backend!r}")
    expect(device.memory() >= 0, "less than nothing is in use")
