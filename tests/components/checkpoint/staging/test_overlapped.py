"""Overlapped staging."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from drawloom.components.checkpoint.staging.overlapped import SMALL, Overlapped
from support.dcp import begin_save, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says to a single process


def test_the_stager_implements_the_protocol_of_torch() -> None:
    """The runtime check of torch's protocol passes, and synchronization is needed before the state changes."""
    stager = Overlapped()
    assert isinstance(stager, AsyncStager)
    assert stager.should_synchronize_after_execute is True
    assert stager.makes_copies


def test_training_waits_for_the_copy_only_before_the_state_changes(state: dict[str, Tensor], gate: Any) -> None:
    """`stage` returns during the copy, `synchronize_staging` when it is complete and right."""
    stager = Overlapped()
    future = stager.stage(state)
    assert gate.reached.wait(10) and not future.done()
    waiting = threading.Thread(target=stager.synchronize_staging)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.opened.set()
    waiting.join(10)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(future.result()["a"], torch.arange(100_000.0))


def test_small_tensors_are_copied_at_once(gate: Any) -> None:
    """Counters and sums change before the weights do."""
    state = {"large": torch.ones(SMALL), "small": torch.ones(SMALL // 4)}
    future = Overlapped().stage(state)
    state["small"].zero_()
    gate.opened.set()
    assert future.result()["small"].sum() == SMALL // 4


def test_a_second_wait_returns_at_once(state: dict[str, Tensor]) -> None:
    """With no pending copy there is nothing to wait for."""
    stager = Overlapped()
    stager.synchronize_staging()
    stager.stage(state)
    stager.synchronize_staging()
    stager.synchronize_staging()


def test_a_failed_copy_is_raised_by_both_waits(state: dict[str, Tensor], gate: Any) -> None:
    """It is raised before the state changes and where the copy is used; not again at the next copy."""
    stager = Overlapped()
    gate.fault = MemoryError("no memory left")
    gate.opened.set()
    future = stager.stage(state)
    with pytest.raises(MemoryError, match="no memory left"):
        stager.synchronize_staging()
    assert isinstance(future.exception(), MemoryError)
    gate.fault = None
    later = stager.stage(state)
    stager.synchronize_staging()
    assert torch.equal(later.result()["a"], state["a"])


def test_an_earlier_failed_copy_is_raised_later(state: dict[str, Tensor], gate: Any) -> None:
    """The error is raised at the first wait, even after another copy."""
    stager = Overlapped()
    gate.fault = MemoryError("no memory left")
    gate.opened.set()
    stager.stage(state).exception()
    gate.fault = None
    stager.stage(state).result()
    with pytest.raises(MemoryError):
        stager.synchronize_staging()


def test_a_value_that_cannot_be_copied_is_refused_at_once() -> None:
    """The call raises, because torch treats an already failed future as a success."""
    with pytest.raises(TypeError, match="a is a set"):
        Overlapped().stage({"a": {1}})


def test_staging_works_after_close(state: dict[str, Tensor]) -> None:
    """Closing frees memory, and later copies work."""
    stager = Overlapped()
    staged = stager.stage(state).result()
    stager.close()
    assert torch.equal(stager.stage(state).result()["a"], staged["a"])


def test_overlapping_async_saves_each_have_their_own_step(tmp_path: Path) -> None:
    """Two `async_save` with one stager, the state changed when staging is complete: every file has its own step."""
    stager = Overlapped()
    weight = torch.zeros(1000, 1000)
    responses: list[Any] = []
    for step in (1, 2, 3):
        weight.fill_(step)
        responses.append(begin_save({"weight": weight}, tmp_path / str(step), stager))
        assert isinstance(responses[-1].staging_completion, Future)
        stager.synchronize_staging()
    weight.fill_(-1)
    for step, response in enumerate(responses, 1):
        response.upload_completion.result()
        loaded = load_checkpoint({"weight": torch.empty(1000, 1000)}, tmp_path / str(step))
        assert set(loaded["weight"].flatten().tolist()) == {step}


@pytest.mark.gpu
def test_a_gpu_state_is_copied_while_the_gpu_computes() -> None:
    """Copies have their step's state, though it changes right after; the host does not wait."""
    weight, stager, busy = torch.zeros(2**26, device="cuda"), Overlapped(), torch.randn(8192, 8192, device="cuda")
    state = {"weight": weight, "column": weight.view(2**13, 2**13)[:, 1]}
    under_way: dict[int, Future[dict[str, Any]]] = {}
    for step in range(8):
        began = time.perf_counter()
        for _ in range(20):
            busy @ busy
        under_way[step] = stager.stage(state | {"step": step})
        stager.synchronize_staging()
        weight.add_(1)
        given = time.perf_counter() - began
        torch.cuda.synchronize()
        if step > 1:  # memory is new to the first two
            assert given < (time.perf_counter() - began) / 3
        if step % 2:
            for number in (step - 1, step):
                _check(under_way.pop(number).result(), number)
    stager.close()


def _check(copy: dict[str, Any], step: int) -> None:
    assert bool((copy["weight"] == step).all()) and bool((copy["column"] == step).all())
    assert copy["weight"].is_pinned() and copy["step"] == step
