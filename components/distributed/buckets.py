"""Sums of many tensors over ranks, several in one collective."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group

BUCKET_BYTES = 32 * 2**20


def sum_in_buckets(
    tensors: Sequence[Tensor], group: Group, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """
    All-reduce tensors of any shapes, in place, to their sums over the ranks.

    All ranks give tensors of the same shapes in the same order. Sums are in `dtype`, or in the tensors' own dtype where
    that is wider; a collective takes as many tensors as make up `bucket_bytes`.
    """
    if group.size > 1:
        for bucket in _buckets(tensors, bucket_bytes):
            _sum(bucket, group, dtype)


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(part.nbytes for part in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _sum(bucket: list[Tensor], group: Group, dtype: torch.dtype) -> None:
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in bucket), dtype)
    flat = torch.cat([tensor.flatten().to(wide) for tensor in bucket])
    group.sum(flat)
    for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
