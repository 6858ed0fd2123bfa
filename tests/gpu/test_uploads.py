"""Neither the GPU nor the host waits for batches."""

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
def record_waits() -> Iterator[list[str]]:
    """Yield a list that gets one torch message per wait of the host for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages: list[str] = []
        try:
            yield messages
        finally:
            torch.cuda.set_sync_debug_mode("default")
            messages += [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]


def rows(count: int) -> TokenBatch:
    """Return a batch of `count` rows with 4096 tokens."""
    tokens = torch.randint(1000, (count, 4096))
    return TokenBatch(tokens, tokens + 1, tokens + 2, tokens + 3, torch.rand(count, 4096))


def test_batches_are_correct_although_memory_is_reused() -> None:
    """Uploaded values are right while the device is busy and freed memory is reused at once."""
    uploads, square = Uploads(GPU), torch.randn(4096, 4096, device=GPU)
    batches, sums = [rows(8) for _ in range(20)], []
    for batch in batches:
        uploaded = uploads.start_upload(batch)
        square = (square @ square).clamp(-1, 1)
        sums.append(sum(tensor.double().sum() for tensor in uploaded.tensors()))
        del uploaded
    expected = [sum(tensor.double().sum() for tensor in batch.tensors()) for batch in batches]
    assert [float(total) for total in sums] == pytest.approx([float(total) for total in expected], rel=1e-12)


def test_host_does_not_wait_for_copies() -> None:
    """Copies of a batch start without waiting, and finish before a long computation on the device ends."""
    uploads, square = Uploads(GPU), torch.randn(8192, 8192, device=GPU)
    uploads.start_upload(rows(8))
    busy: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with record_waits() as messages:
        for _ in range(50):
            square = (square @ square).clamp(-1, 1)
        busy.record()
        uploaded = uploads.start_upload(rows(8))
    uploads._stream.synchronize()
    assert not busy.query(), "the copies waited for the products"
    assert not messages and uploaded.tokens.is_cuda


def test_host_waits_at_most_once_per_step() -> None:
    """In steps with an optimizer the host waits only for the metrics of the step before."""
    mesh: Any = SingleRankMesh()
    device = ComputeDevice(kind="cuda")
    device.open()
    try:
        Small(mesh, device, "adamw", "auto").train(2)
        with record_waits() as messages:
            Small(mesh, device, "adamw", "auto").train(12)
    finally:
        device.close()
    # Opening the model and the first step wait as well.
    first_count = len(messages)
    with record_waits() as later_messages:
        Small(mesh, device, "adamw", "auto").train(22)
    assert len(later_messages) - first_count <= 10, later_messages[-10:]


def test_gpu_is_not_idle_between_steps() -> None:
    """Kernels fill 99 % of twenty steps that upload a batch."""
    uploads, square = Uploads(GPU), torch.randn(8192, 8192, device=GPU)

    def step() -> None:
        nonlocal square
        uploaded = uploads.start_upload(rows(4))
        square = square + uploaded.weights.sum() * 1e-9
        for _ in range(10):
            square = (square @ square).clamp(-1, 1)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as running:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    assert running.profiler is not None and running.profiler.kineto_results is not None
    events = [event for event in running.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    kernels = [event for event in events if "Mem" not in event.name()]
    busy = sum(event.duration_ns() for event in kernels)
    begun = min(event.start_ns() for event in kernels)
    ended = max(event.start_ns() + event.duration_ns() for event in kernels)
    assert busy > 0.99 * (ended - begun)
