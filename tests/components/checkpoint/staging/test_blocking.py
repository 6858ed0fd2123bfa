"""Blocking staging."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from drawloom.components.checkpoint.staging.blocking import Blocking
from support.dcp import begin_save, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says to a single process


def test_the_stager_implements_the_protocol_of_torch() -> None:
    """The runtime check of torch's protocol passes, and no synchronization is needed."""
    stager = Blocking()
    assert isinstance(stager, AsyncStager)
    assert stager.should_synchronize_after_execute is False
    assert stager.makes_copies


def test_the_copy_does_not_change_with_the_state(state: dict[str, Tensor]) -> None:
    """The state may change as soon as `stage` has returned."""
    stager = Blocking()
    staged = stager.stage(state)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(staged["a"], torch.arange(100_000.0))
    assert staged["b"].sum() == 50_000 and staged["step"] == 3


def test_two_copies_at_once_are_separate(state: dict[str, Tensor]) -> None:
    """The second does not change the first, although buffers are reused."""
    stager = Blocking()
    first = stager.stage(state)
    state["a"].zero_()
    second = stager.stage(state)
    assert first["a"].sum() > 0 and second["a"].sum() == 0


def test_kept_memory_does_not_grow(state: dict[str, Tensor]) -> None:
    """A hundred copies need the memory of one."""
    stager = Blocking()
    large = {"a": torch.ones(2_000_000)}
    stager.stage(large)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        stager.stage(large)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; one copy has 8,000


def test_staging_works_after_close(state: dict[str, Tensor]) -> None:
    """Closing frees unused memory and affects neither copies in use nor later ones."""
    stager = Blocking()
    staged = stager.stage(state)
    stager.close()
    assert torch.equal(stager.stage(state)["a"], staged["a"])
    stager.close()
    stager.close()


@pytest.mark.parametrize("keep", [True, False])
def test_overlapping_async_saves_each_have_their_own_step(tmp_path: Path, keep: bool) -> None:
    """Two `async_save` with one stager while training continues: both files have their step's state."""
    stager = Blocking(keep=keep)
    weight = torch.zeros(1000, 1000)
    futures: list[Any] = []
    for step in (1, 2, 3):
        weight.fill_(step)
        futures.append(begin_save({"weight": weight}, tmp_path / str(step), stager))
    weight.fill_(-1)
    for step, future in enumerate(futures, 1):
        future.result()
        loaded = load_checkpoint({"weight": torch.empty(1000, 1000)}, tmp_path / str(step))
        assert set(loaded["weight"].flatten().tolist()) == {step}


@pytest.mark.gpu
def test_a_gpu_state_is_copied_to_pinned_memory() -> None:
    """It is complete when `stage` returns, and equal views share memory; the next copy does not reuse memory in use."""
    weight, stager = torch.zeros(2**20, device="cuda"), Blocking()
    copies = []
    for step in range(3):
        weight.fill_(step)
        copies.append(stager.stage({"weight": weight, "tied": weight.view(-1), "part": weight[5:9]}))
        weight.fill_(-1)
    for step, copy in enumerate(copies):
        assert copy["weight"].unique().tolist() == [float(step)] and copy["weight"].is_pinned()
        assert copy["tied"].data_ptr() == copy["weight"].data_ptr() and copy["part"].tolist() == 4 * [float(step)]
