"""
Sums over shards of gradients of 16 bits: each is sent as it is, and added up in a wider dtype where it arrives.

A reduce-scatter of the wider dtype would send each number in more bytes than it has, and a reduce-scatter of 16 bits
would round every partial sum.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.ports.distributed import Precision


def sent_dtype(precision: Precision, replicas: bool) -> torch.dtype:
    """
    The dtype in which gradients travel to the rank that has their slice.

    Those that `replicas` sum over, too, are the sums of a rank's shards, which would be rounded in between.
    """
    if precision.gradient.itemsize == 2 and not replicas:
        return precision.gradient
    return torch.promote_types(precision.reduce, precision.gradient)


@attrs.frozen
class NarrowReduceScatter:
    """As torch's FSDP2 takes it (`FSDPModule.set_custom_reduce_scatter`); sums are in `wide`, in the order of ranks."""

    wide: torch.dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, or for this rank's slice."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put the sum of all ranks' parts for this rank, of input_tensor (ranks * n,), in output_tensor (n,)."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0, dtype=self.wide))
