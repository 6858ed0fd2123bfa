"""Profiler traces of chosen steps."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.listeners.profiler import Profiler
from drawloom.components.ports.run import Event, Step


@attrs.frozen
class Folder:
    """A run folder."""

    folder: Path


@pytest.fixture
def profiler(tmp_path: Path, one_rank: Any) -> Iterator[Profiler]:
    """A profiler of step 2."""
    profiler = Profiler(folder=Folder(tmp_path), mesh=one_rank, steps=[2])
    yield profiler
    profiler.close()


def _take(profiler: Profiler, index: int) -> None:
    step = Step(index, 9)
    profiler.on_event(Event("step_started", step))
    torch.ones(3, 3) @ torch.ones(3, 3)
    profiler.on_event(Event("step_ended", step))


def test_chosen_steps_are_traced(profiler: Profiler, tmp_path: Path) -> None:
    """There is one trace, of step 2, with the matmul of that step."""
    for index in (1, 2, 3):
        _take(profiler, index)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "step-2-rank-0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_a_profiler_that_fails_is_turned_off(
    profiler: Profiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a file in the folder's place: one warning, no error, and no second try."""
    (tmp_path / "traces").write_text("")
    for _ in range(3):
        _take(profiler, 2)
    (message,) = caplog.messages
    assert message.startswith("no more traces: the profiler failed at step 2: ")


def test_an_unfinished_trace_is_discarded_on_close(profiler: Profiler, tmp_path: Path) -> None:
    """A run that ends inside the step leaves no trace, and torch can profile again."""
    profiler.on_event(Event("step_started", Step(2, 9)))
    profiler.close()
    assert not list(tmp_path.iterdir())
    with torch.profiler.profile(acc_events=True) as other:
        torch.ones(1)
    assert other.events()


def test_steps_count_from_one(tmp_path: Path, one_rank: Any) -> None:
    """Step 0 is an invalid setting."""
    with pytest.raises(ValueError, match="there is no step 0; the first is 1"):
        Profiler(folder=Folder(tmp_path), mesh=one_rank, steps=[1, 0])
