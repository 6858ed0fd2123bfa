"""Sums of many tensors over ranks, several in one collective."""

from collections.abc import Sequence
from functools import reduce

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group, Pending

BUCKET_BYTES = 32 * 2**20


@attrs.frozen(eq=False)
class Sum:
    """A sum over ranks in progress: of tensors of any shapes, which make up `flat`."""

    tensors: Sequence[Tensor]
    flat: Tensor
    pending: Pending

    def finish(self) -> None:
        """Wait for the sums, on a GPU without the host, and write them to the tensors."""
        self.pending.wait()
        parts = torch.split(self.flat, [tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def start_sum(tensors: Sequence[Tensor], group: Group, dtype: torch.dtype) -> Sum:
    """
    Begin to all-reduce tensors of any shapes in one collective.

    All ranks give tensors of the same shapes in the same order. Sums are in `dtype`, or in the tensors' own dtype where
    that is wider.
    """
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), dtype)
    flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in tensors])
    return Sum(list(tensors), flat, group.start_sum(flat))


def sum_in_buckets(
    tensors: Sequence[Tensor], group: Group, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All-reduce tensors in place, as `start_sum`; a collective takes as many as make up `bucket_bytes`."""
    bucket: list[Tensor] = []
    for number, tensor in enumerate(tensors if group.size > 1 else ()):
        bucket.append(tensor)
        if bucket_bytes_of(bucket) >= bucket_bytes or number == len(tensors) - 1:
            start_sum(bucket, group, dtype).finish()
            bucket = []


def bucket_bytes_of(tensors: Sequence[Tensor]) -> int:
    """The bytes of tensors of any shapes."""
    return sum(tensor.nbytes for tensor in tensors)
