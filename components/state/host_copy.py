"""Asynchronous copies to the host."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor


@attrs.frozen
class HostCopy:
    """Asynchronous copies on the CPU; `event` is recorded after the copies, None for tensors already there."""

    tensors: Mapping[str, Tensor]
    event: torch.cuda.Event | None = None

    @classmethod
    def start(cls, tensors: Mapping[str, Tensor]) -> "HostCopy":
        """
        Enqueue copies of tensors of any shape on the current stream.

        Tensors on the CPU are not copied, and must not change.
        """
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return cls(tensors)
        # A copy that does not block goes to pinned memory, which torch allocates for it.
        host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(host, event)

    @property
    def has_arrived(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Mapping[str, Tensor]:
        """Return the tensors on the CPU. Waits for this copy, not for operations that were enqueued after it."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors
