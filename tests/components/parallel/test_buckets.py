"""Sums of many tensors in few collectives."""

from typing import Any

import torch
from torch import Tensor

from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.buckets import sum_in_buckets
from drawloom.components.ports.distributed import Pending


class Doubling(SingleProcess):
    """Two ranks with the same gradients."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[torch.dtype, int]] = []

    def start_sum(self, tensor: Tensor) -> Pending:
        self.calls.append((tensor.dtype, tensor.numel()))
        tensor.mul_(2)
        return super().start_sum(tensor)


def test_each_tensor_is_summed_once_in_buckets_of_a_dtype() -> None:
    """Tensors of any shape get their sums; a bucket ends when it is full, and its dtype is at least the one given."""
    tensors: list[Any] = [torch.ones(2, 3), torch.ones(()), torch.ones(4).bfloat16(), torch.ones(1).double()]
    group = Doubling()
    sum_in_buckets(tensors, group, torch.float32, bucket_bytes=28)
    assert all(bool((tensor == 2).all()) for tensor in tensors)
    assert group.calls == [(torch.float32, 7), (torch.float64, 5)]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.float32, torch.bfloat16, torch.float64]


def test_only_more_than_two_ranks_need_a_wider_sum() -> None:
    """A sum of two 16-bit values is rounded once in 16 bits, too; three ranks sum in the given dtype."""
    values = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16()
    assert torch.equal(values[0] + values[1], (values[0].float() + values[1].float()).bfloat16())
    for size, dtype in ((2, torch.bfloat16), (3, torch.float32)):
        group = Doubling()
        group.size = size
        sum_in_buckets([torch.ones(8).bfloat16()], group, torch.float32, bucket_bytes=28)
        assert group.calls == [(dtype, 8)]
