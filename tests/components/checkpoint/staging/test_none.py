"""No staging."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from drawloom.components.checkpoint.staging.none import NoStaging
from support.dcp import begin_save, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says to a single process


def test_nothing_is_copied() -> None:
    """The stager returns the state itself, and `makes_copies` is False."""
    state = {"a": torch.ones(3)}
    stager = NoStaging()
    assert stager.stage(state) is state
    assert not stager.makes_copies
    stager.synchronize_staging()
    stager.close()


def test_async_save_works_without_a_copy(tmp_path: Path) -> None:
    """The caller waits for the upload before the state changes."""
    stager = NoStaging()
    assert isinstance(stager, AsyncStager)
    state = {"a": torch.arange(9.0)}
    future = begin_save(state, tmp_path / "x", stager)
    future.result()
    assert torch.equal(load_checkpoint({"a": torch.empty(9)}, tmp_path / "x")["a"], state["a"])
