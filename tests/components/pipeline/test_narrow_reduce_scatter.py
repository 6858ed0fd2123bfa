"""Sums over shards of gradients of 16 bits."""

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.narrow_reduce_scatter import NarrowReduceScatter, sent_dtype
from support.processes import run_ranks

LENGTH = 40


def _parts(rank: int) -> Tensor:
    """What a rank has for all ranks; 256 in bfloat16, whose next number is 258, swallows each 1 of the others."""
    generator = torch.Generator().manual_seed(rank)
    parts = torch.randn(3 * LENGTH, generator=generator)
    parts[::7] = 256.0 if rank == 0 else 1.0
    return parts.bfloat16()


def _summed() -> Tensor:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        scatter = NarrowReduceScatter()
        mine = scatter.allocate((LENGTH,), dtype=torch.bfloat16, device=torch.device("cpu"))
        scatter(mine, _parts(processes.rank), dist.group.WORLD, dist.ReduceOp.SUM)
        return mine
    finally:
        processes.close()


def test_sums_are_rounded_once() -> None:
    """Each rank gets the float32 sum of its part over all ranks, rounded to bfloat16, and no sum of rounded sums."""
    exact = torch.stack([_parts(rank).float() for rank in range(3)]).sum(0).bfloat16().view(3, LENGTH)
    assert any((part == 258.0).any() for part in exact)
    assert all(torch.equal(found, right) for found, right in zip(run_ranks(_summed, 3), exact, strict=True))


def test_what_is_summed_further_is_not_rounded_in_between() -> None:
    """Gradients travel in 16 bits if the sum is all there is; with replicas, and wider gradients, in the wide dtype."""
    pure, mixed = DtypePolicy(parameter="bfloat16"), DtypePolicy(compute="bfloat16")
    assert sent_dtype(pure, replicas=False) == torch.bfloat16
    assert sent_dtype(pure, replicas=True) == sent_dtype(mixed, replicas=False) == torch.float32
    assert sent_dtype(DtypePolicy(parameter="float64"), replicas=False) == torch.float64
