"""The same bits each time."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drawloom.components.run.determinism import WORKSPACE, Determinism
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.graph import UserError


@pytest.fixture(autouse=True)
def own_determinism() -> Iterator[None]:
    """Other tests see nothing of this."""
    before = Determinism.now()
    yield
    before.apply()


@pytest.fixture
def node(job: Any, one_rank: Any) -> ProcessRandomness:
    """Randomness that is deterministic."""
    return ProcessRandomness(job=job, mesh=one_rank, deterministic=True)


@pytest.mark.parametrize(
    ("chosen", "used"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8"), (":4096:2:16:8", ":4096:8")]
)
def test_a_process_is_deterministic_while_it_is_open(
    chosen: str | None, used: str, node: ProcessRandomness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that torch looks at says so, and is afterwards as it was before, a workspace that somebody chose too."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(WORKSPACE, chosen)
    torch.backends.cudnn.benchmark = True
    before = Determinism.now()
    node.open()
    assert Determinism.now() == Determinism(True, False, True, False, used)
    assert os.environ[WORKSPACE] == used
    node.close()
    assert Determinism.now() == before
    node.close()
    assert Determinism.now() == before


def test_unless_it_is_asked_for_torch_is_left_alone(job: Any, one_rank: Any) -> None:
    """The default costs no speed."""
    before = Determinism.now()
    node = ProcessRandomness(job=job, mesh=one_rank)
    node.open()
    assert Determinism.now() == before
    node.close()


def test_what_can_t_be_the_same_each_time_is_told(node: ProcessRandomness, job: Any, one_rank: Any) -> None:
    """An operation that torch refuses becomes a sentence with the setting; other errors stay what they are."""
    node.open()
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
    node.close()
    told = node.on_failure(caught.value)
    assert isinstance(told, UserError)
    assert "randomness.deterministic is on, and put_ does not have a deterministic implementation" in str(told)
    assert node.on_failure(RuntimeError("out of memory")) is None
    assert ProcessRandomness(job=job, mesh=one_rank).on_failure(caught.value) is None
