"""Copies of batches from the host to a GPU, beside what the GPU computes."""

from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import leaves, transform


@attrs.define
class Uploads:
    """
    Copies trees of tensors to a device, on a stream of their own.

    The host is ahead of a GPU: it issues a step while the GPU computes the one before. A copy that does not wait for
    the kernels of that one is done before its own step begins, so that neither host nor GPU waits for it. On a CPU
    nothing is copied.
    """

    device: torch.device

    def start(self, tree: Any) -> Any:
        """The tree on the device; what the current stream does from now on comes after the copies."""
        if self.device.type == "cpu":
            return tree
        with torch.cuda.stream(self._stream):
            there = transform(self._copied, tree)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for leaf in leaves(there):
            if isinstance(leaf, Tensor):
                # It is in memory of the stream of copies, which must not use that again before this one has read it.
                leaf.record_stream(current)
        return there

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_cpu:
            return leaf
        # From memory that is not pinned the driver copies twice, and the host takes part in it.
        return leaf.contiguous().pin_memory().to(self.device, non_blocking=True)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
