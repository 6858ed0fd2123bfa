"""Copies of a device's tensors for the host, which does not wait until it reads them."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor


@attrs.frozen
class HostCopy:
    """Tensors of any shapes by name, on their way from the device to the CPU; `arrived` is None if they are there."""

    tensors: Mapping[str, Tensor]
    arrived: torch.cuda.Event | None = None

    @classmethod
    def start(cls, tensors: Mapping[str, Tensor]) -> "HostCopy":
        """Enqueue the copies on the current stream; tensors on the CPU are not copied, and must not change."""
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return cls(tensors)
        # A copy that does not block goes to pinned memory, which torch allocates for it.
        host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(host, arrived)

    def read(self) -> Mapping[str, Tensor]:
        """The tensors on the CPU; waits for this copy alone, and not for what was enqueued after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensors
