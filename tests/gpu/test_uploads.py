"""What only a GPU can show of batches: that neither it nor the host waits for them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.pipeline.runtime.uploads import Uploads
from drawloom.components.ports.data import TokenBatch
from support.checkpoints import SingleRankMesh
from support.late_steps import Small

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
GPU = torch.device("cuda", 0)


@contextmanager
def waits() -> Iterator[list[str]]:
    """The messages of torch, one for each time that the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(each.message) for each in caught if "synchronizing" in str(each.message)]


def rows(count: int) -> TokenBatch:
    """A batch of `count` rows of 4096 tokens."""
    tokens = torch.randint(1000, (count, 4096))
    return TokenBatch(tokens, tokens + 1, tokens + 2, tokens + 3, torch.rand(count, 4096))


def test_batches_arrive_whole_though_memory_is_used_again() -> None:
    """Values are right while the device is busy and batches come and go, with copies that reuse memory at once."""
    uploads, square = Uploads(GPU), torch.randn(4096, 4096, device=GPU)
    batches, sums = [rows(8) for _ in range(20)], []
    for batch in batches:
        there = uploads.start(batch)
        square = (square @ square).clamp(-1, 1)
        sums.append(sum(tensor.double().sum() for tensor in there.tensors()))
        del there
    expected = [sum(tensor.double().sum() for tensor in batch.tensors()) for batch in batches]
    assert [float(each) for each in sums] == pytest.approx([float(each) for each in expected], rel=1e-12)


def test_the_host_does_not_wait_for_copies() -> None:
    """A batch is on its way while the device computes something long, and copies are done before that ends."""
    uploads, square = Uploads(GPU), torch.randn(8192, 8192, device=GPU)
    uploads.start(rows(8))
    busy: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with waits() as found:
        for _ in range(50):
            square = (square @ square).clamp(-1, 1)
        busy.record()
        there = uploads.start(rows(8))
    uploads._stream.synchronize()
    assert not busy.query(), "the copies waited for the products"
    assert not found and there.tokens.is_cuda


def test_steps_wait_once_at_most() -> None:
    """Of whole steps with an optimizer, by the host: of the values of the step before, and of nothing else."""
    mesh: Any = SingleRankMesh()
    device = ComputeDevice(kind="cuda")
    device.open()
    try:
        Small(mesh, device, "adamw", "auto").train(2)
        with waits() as found:
            Small(mesh, device, "adamw", "auto").train(12)
    finally:
        device.close()
    # What opens the model, and the first step, wait as well.
    few = len(found)
    with waits() as more:
        Small(mesh, device, "adamw", "auto").train(22)
    assert len(more) - few <= 10, more[-10:]


def test_the_gpu_is_not_idle_between_steps() -> None:
    """Kernels fill 99 % of twenty steps in which a batch comes from the host, each of some milliseconds of products."""
    uploads, square = Uploads(GPU), torch.randn(8192, 8192, device=GPU)

    def step() -> None:
        nonlocal square
        there = uploads.start(rows(4))
        square = square + there.weights.sum() * 1e-9
        for _ in range(10):
            square = (square @ square).clamp(-1, 1)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as running:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    assert running.profiler is not None and running.profiler.kineto_results is not None
    events = [each for each in running.profiler.kineto_results.events() if "CUDA" in str(each.device_type())]
    kernels = [each for each in events if "Mem" not in each.name()]
    busy = sum(each.duration_ns() for each in kernels)
    begun = min(each.start_ns() for each in kernels)
    ended = max(each.start_ns() + each.duration_ns() for each in kernels)
    assert busy > 0.99 * (ended - begun)
