"""Deterministic algorithms."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drawloom.components.run.generators import WORKSPACE, Determinism
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.graph import UserError


@pytest.fixture(autouse=True)
def own_determinism() -> Iterator[None]:
    """Restore the determinism settings after the test."""
    before = Determinism.read_current()
    yield
    before.apply()


@pytest.fixture
def node(job: Any, one_rank: Any) -> ProcessRandomness:
    """Return a randomness node with deterministic = true."""
    return ProcessRandomness(job=job, mesh=one_rank, deterministic=True)


@pytest.mark.parametrize(
    ("chosen", "used"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8"), (":4096:2:16:8", ":4096:8")]
)
def test_determinism_is_on_while_open_and_restored_after(
    chosen: str | None, used: str, node: ProcessRandomness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings are on while the node is open and restored on close, a workspace set by the user too."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(WORKSPACE, chosen)
    torch.backends.cudnn.benchmark = True
    before = Determinism.read_current()
    node.open()
    assert Determinism.read_current() == Determinism(True, False, True, False, used)
    assert os.environ[WORKSPACE] == used
    node.close()
    assert Determinism.read_current() == before
    node.close()
    assert Determinism.read_current() == before


def test_by_default_the_settings_are_unchanged(job: Any, one_rank: Any) -> None:
    """The default does not slow torch down."""
    before = Determinism.read_current()
    node = ProcessRandomness(job=job, mesh=one_rank)
    node.open()
    assert Determinism.read_current() == before
    node.close()


def test_an_operation_without_a_deterministic_implementation_is_a_user_error(
    node: ProcessRandomness, job: Any, one_rank: Any
) -> None:
    """torch's RuntimeError becomes a message with the name of the setting; other errors are unchanged."""
    node.open()
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
    node.close()
    replaced = node.on_failure(caught.value)
    assert isinstance(replaced, UserError)
    assert "randomness.deterministic is on, and put_ does not have a deterministic implementation" in str(replaced)
    assert node.on_failure(RuntimeError("out of memory")) is None
    assert ProcessRandomness(job=job, mesh=one_rank).on_failure(caught.value) is None
