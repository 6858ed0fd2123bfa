"""Activations in host memory against activations on the device, bit for bit."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import drawloom
from drawloom.components.pipeline.runtime.offloads import Offloads
from drawloom.components.pipeline.schedules.gpipe import GPipe
from drawloom.kernels.recompute.saved_tensors import Collecting
from support.observers_of_runs import TINY
from support.pipelines import batches
from support.steps import train
from support.transfers import DelayedTransfers, NoWaits

MICROBATCHES = 5


def gradients(folder: Path, transfers: Any, is_everywhere: bool = True, **settings: Any) -> dict[str, Tensor]:
    """
    Return the gradients of two steps, whose activations leave by these transfers, or by a run's if "real".

    With `is_everywhere` the activations of all stages leave.
    """
    schedule = {"use": f"pipeline.schedules.{settings.pop('schedule', 'gpipe')}"}
    offload = {"offload": {"use": "pipeline.offloaded"}} if is_everywhere and transfers is not None else {}
    run = {"name": "small", "folder": str(folder / "run")}
    recipe = drawloom.Recipe.load("first_run").with_values(
        {"model": TINY, "run": run, "schedule": schedule, "stages": settings, **offload}
    )
    with recipe.open(only="executor") as objects:
        executor = objects["executor"]
        if isinstance(transfers, DelayedTransfers):
            executor._plans._offloads = Offloads(transfers)
        for _ in range(2):
            train(executor, batches(MICROBATCHES))
        named = executor.stages.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        *(("gpipe", recompute) for recompute in ("none", "selective", "quantized", 2)),
        *(("zero_bubble_v", recompute) for recompute in ("none", "selective", "quantized", 2)),
        ("one_f_one_b", "none"),
    ],
)
def test_offloaded_activations_leave_no_trace(schedule: str, recompute: Any, tmp_path: Path) -> None:
    """Gradients have the bits of a run without offloading, whatever is recomputed, with whole and split backwards."""
    plain = gradients(tmp_path, None, schedule=schedule, recompute=recompute)
    transfers = DelayedTransfers(seed=0)
    offloaded = gradients(tmp_path, transfers, schedule=schedule, recompute=recompute)
    assert offloaded.keys() == plain.keys()
    assert all(torch.equal(offloaded[name], plain[name]) for name in plain)
    # On one rank, 1F1B has no pass between a forward and its backward.
    assert (transfers.stored > 0) == (schedule != "one_f_one_b") and transfers.stored == transfers.fetched


def test_a_program_chooses_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule's offloaded stages wait in host memory without a feature, with the same gradients."""
    plain, transfers, build = gradients(tmp_path, None), DelayedTransfers(4), GPipe.program_for_ranks
    offloading = lambda *sizes: attrs.evolve(build(*sizes), offloaded=frozenset({0}))  # noqa: E731
    monkeypatch.setattr(GPipe, "program_for_ranks", offloading)
    offloaded = gradients(tmp_path, transfers, is_everywhere=False)
    assert transfers.stored > 0
    assert all(torch.equal(offloaded[name], plain[name]) for name in plain)


def test_transfers_of_a_run_leave_no_trace(tmp_path: Path) -> None:
    """Gradients have the same bits with the copies that a run makes on this machine's device."""
    plain, offloaded = gradients(tmp_path, None), gradients(tmp_path, "real")
    assert all(torch.equal(offloaded[name], plain[name]) for name in plain)


def test_passes_that_do_not_wait_are_noticed(tmp_path: Path) -> None:
    """A backward pass that begins before its activations arrive fails, or has other gradients."""
    plain = gradients(tmp_path, None)
    with pytest.raises((RuntimeError, AssertionError)):
        hasty = gradients(tmp_path, NoWaits(1))
        assert all(torch.equal(hasty[name], plain[name]) for name in plain)


def test_memory_is_freed_and_views_stay_views() -> None:
    """Kept tensors, but no parameters, inputs or outputs, leave their memory; wrappers have the same values after."""
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
    with Collecting() as collecting:
        inner = x @ weight
        halves = inner.chunk(2, 1)
        output = (halves[0].sigmoid() * halves[1].tanh()).sum()
    others = {tensor.data_ptr() for tensor in (x, output)}
    saved = [wrapper.get_or_recompute() for weak in collecting.kept if (wrapper := weak()) is not None]
    storages: list[Any] = [
        StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        for tensor in saved
        if tensor.data_ptr() not in others
    ]
    del saved
    expected = torch.autograd.grad(output, [x, weight], retain_graph=True)
    del inner, halves
    offloads = Offloads(DelayedTransfers(2))
    tensors = offloads.start_offload(collecting.kept, [x, output])
    tensors.free_device_memory()
    assert tensors.byte_count > 0 and all(storage.expired() for storage in storages)
    tensors.reload()
    wrappers = [wrapper for weak in collecting.kept if (wrapper := weak()) is not None]
    on_device = [wrapper.get_or_recompute().data_ptr() for wrapper in wrappers]
    tensors.free_device_memory()  # a program that reloads soon frees late
    assert [wrapper.get_or_recompute().data_ptr() for wrapper in wrappers] == on_device
    del wrappers
    tensors.wait_for_reload()
    assert all(map(torch.equal, torch.autograd.grad(output, [x, weight]), expected))


def test_host_memory_is_reused() -> None:
    """A second microbatch takes the memory of the first one after its return."""
    offloads = Offloads(DelayedTransfers(3))
    first, _ = offloads.take_host_memory(100)
    offloads.return_host_memory(first, None)
    assert offloads.take_host_memory(100)[0] is first and offloads.take_host_memory(100)[0] is not first
