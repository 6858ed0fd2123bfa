"""All-reduce for many tensors in buckets, as in DDP."""

from collections.abc import Sequence
from functools import reduce

import attrs
import torch
from torch import Tensor

from drawloom.ports import Group, Pending


@attrs.define(eq=False)
class BucketedSums:
    """
    Pending sums over a group's ranks; a collective sums one bucket, about `bucket_bytes`. All ranks add tensors with
    the same shapes in the same order. Sums are in `dtype`, or in the tensors' own dtype if it is wider. Two ranks
    send tensors in their own dtype: a sum of two is rounded once in either.
    """

    group: Group
    dtype: torch.dtype
    bucket_bytes: int
    _bucket: list[Tensor] = attrs.field(factory=list)
    _bytes: int = 0
    _started: list[tuple[list[Tensor], Tensor, Pending]] = attrs.field(factory=list)

    def add_to_bucket(self, tensor: Tensor) -> None:
        """Add a tensor (any shape), unchanged until `wait_and_write_sums`, and send the bucket if it is full."""
        self._bucket.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes >= self.bucket_bytes:
            self.start_bucket_sum()

    @torch.no_grad()
    def start_bucket_sum(self) -> None:
        """Start to sum the tensors in the bucket."""
        if not self._bucket:
            return
        dtypes = [tensor.dtype for tensor in self._bucket]
        sum_dtype = reduce(torch.promote_types, dtypes, dtypes[0] if self.group.size == 2 else self.dtype)
        flat = torch.cat([tensor.detach().flatten().to(sum_dtype) for tensor in self._bucket])
        self._started.append((self._bucket, flat, self.group.start_sum(flat)))
        self._bucket, self._bytes = [], 0

    @torch.no_grad()
    def wait_and_write_sums(self) -> None:
        """Wait for all sums and write them to the tensors. On a GPU only the stream waits, not the host."""
        self.start_bucket_sum()
        while self._started:
            tensors, flat, pending = self._started.pop(0)
            pending.wait()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])


def sum_in_buckets(tensors: Sequence[Tensor], group: Group, dtype: torch.dtype, bucket_bytes: int) -> None:
    """All-reduce tensors (any shapes) in place, as `BucketedSums` does."""
    sums = BucketedSums(group, dtype, bucket_bytes)
    for tensor in tensors:
        sums.add_to_bucket(tensor)
    sums.wait_and_write_sums()
