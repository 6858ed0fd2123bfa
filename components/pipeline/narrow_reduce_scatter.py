"""
Sums over shards of gradients of 16 bits: each is sent as it is, and added up in float32 where it arrives.

A reduce-scatter of float32 would send each number in more bytes than it has, and a reduce-scatter of 16 bits would
round every partial sum.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.ports.distributed import Precision
from drawloom.kernels.sum_parts import sum_parts


def sent_dtype(precision: Precision, replicas: bool) -> torch.dtype:
    """
    The dtype in which gradients travel to the rank that has their slice.

    Those that `replicas` sum over, too, are the sums of a rank's shards, which would be rounded in between.
    """
    wide = torch.promote_types(precision.reduce, precision.gradient)
    return precision.gradient if precision.gradient.itemsize == 2 and wide == torch.float32 and not replicas else wide


@attrs.frozen
class NarrowReduceScatter:
    """As torch's FSDP2 takes it (`FSDPModule.set_custom_reduce_scatter`); sums are rounded once."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory of any shape, for what is sent or for this rank's slice."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put the sum of all ranks' parts for this rank, of input_tensor (ranks * n,), in output_tensor (n,)."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        sum_parts(received.view(group.size(), -1), output_tensor)
