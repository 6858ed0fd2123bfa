"""Uploads: batches are copied to a GPU while it computes."""

from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import list_leaves, map_leaves


@attrs.define
class Uploads:
    """
    Copier for tensor trees to a device, on its own stream.

    The host issues a step while the GPU computes the previous step. A copy does not wait for the previous step's
    kernels and ends before its own step begins, so neither the host nor the GPU waits for it.
    """

    device: torch.device

    def start_upload(self, tree: Any) -> Any:
        """Return the tree on the device; later operations on the current stream wait for the copies."""
        on_host = (isinstance(leaf, Tensor) and leaf.is_cpu for leaf in list_leaves(tree))
        if not any(on_host):
            return tree
        with torch.cuda.stream(self._stream):
            copies = map_leaves(self._start_leaf_copy, tree)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for leaf in list_leaves(copies):
            if isinstance(leaf, Tensor):
                # The copy stream must not reuse the memory of a leaf before the current stream has read it.
                leaf.record_stream(current)
        return copies

    def _start_leaf_copy(self, leaf: Any) -> Any:
        """Return a tensor's copy on the device, issued without waiting; other leaves stay."""
        if not isinstance(leaf, Tensor) or not leaf.is_cpu:
            return leaf
        # From memory that is not pinned the driver copies twice, with the help of the host.
        return leaf.contiguous().pin_memory().to(self.device, non_blocking=True)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
