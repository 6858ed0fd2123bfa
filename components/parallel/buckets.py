"""Sums of many tensors over ranks, several in one collective."""

from collections.abc import Sequence
from functools import reduce

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group, Pending

BUCKET_BYTES = 32 * 2**20


@attrs.define(eq=False)
class BucketedSums:
    """
    Sums over the ranks of a group, in progress: a collective takes as many tensors as make up `bucket_bytes`.

    All ranks add tensors of the same shapes in the same order. Sums are in `dtype`, or in the tensors' own dtype where
    that is wider.
    """

    group: Group
    dtype: torch.dtype
    bucket_bytes: int = BUCKET_BYTES
    _bucket: list[Tensor] = attrs.field(factory=list)
    _bytes: int = 0
    _started: list[tuple[list[Tensor], Tensor, Pending]] = attrs.field(factory=list)

    def add(self, tensor: Tensor) -> None:
        """A tensor of any shape, which is not changed until `finish`; a full bucket is sent."""
        self._bucket.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes >= self.bucket_bytes:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Send what has been added."""
        if not self._bucket:
            return
        wide = reduce(torch.promote_types, (tensor.dtype for tensor in self._bucket), self.dtype)
        flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in self._bucket])
        self._started.append((self._bucket, flat, self.group.start_sum(flat)))
        self._bucket, self._bytes = [], 0

    @torch.no_grad()
    def finish(self) -> None:
        """Send the rest, wait for all sums, on a GPU without the host, and write them to the tensors."""
        self.flush()
        while self._started:
            tensors, flat, pending = self._started.pop(0)
            pending.wait()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def sum_in_buckets(
    tensors: Sequence[Tensor], group: Group, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All-reduce tensors of any shapes in place, as `BucketedSums`; one rank sends nothing."""
    if group.size > 1:
        sums = BucketedSums(group, dtype, bucket_bytes)
        for tensor in tensors:
            sums.add(tensor)
        sums.finish()
