"""Streams for stages, with stand-ins that record their work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import Tensor, nn

import drawloom
from drawloom.components.pipeline.schedules.dual_pipe_v import DualPipeV
from drawloom.components.pipeline.streams import ConcurrentStages, create_streams
from drawloom.components.ports.passes import RunnableStage
from drawloom.components.ports.program import OPS, Action, iterate_actions
from drawloom.components.ports.stages import Stage

MAIN = "main"


@attrs.define(eq=False)
class Stream:
    """A stream that records its work and its waits by stream and position."""

    device: str = "cuda"
    work: list[Any] = attrs.field(factory=list)
    seen: dict[int, int] = attrs.field(factory=dict)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for all work of another stream."""
        self.wait_event((other, len(other.work), dict(other.seen)))

    def wait_event(self, event: tuple["Stream", int, dict[int, int]]) -> None:
        """Wait for another stream's work so far, and for all it had waited for."""
        other, count, seen = event
        for key, count_seen in (*seen.items(), (id(other), count)):
            self.seen[key] = max(count_seen, self.seen.get(key, 0))

    def record_event(self) -> tuple["Stream", int, dict[int, int]]:
        """Record this stream's work so far."""
        return self, len(self.work), dict(self.seen)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The current stream is the last of these."""
    stack = [Stream()]

    @contextmanager
    def stream(given: Stream) -> Iterator[None]:
        stack.append(given)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stack[-1])
    return stack


def stages(*modules: nn.Module) -> dict[int, Any]:
    """Stages with these modules."""
    parts = [mock.Mock(spec=Stage, index=index, module=module) for index, module in enumerate(modules)]
    return {part.index: mock.Mock(spec=RunnableStage, stage=part) for part in parts}


def test_a_pass_waits_only_for_its_input_and_its_stage(current: list[Stream]) -> None:
    """
    Under DualPipeV on one rank, a pass comes after the pass that makes its input, and after its stage's earlier ones;
    some overlapping forward and backward passes do not wait for one another.
    """
    feature = ConcurrentStages(device=mock.Mock(device=torch.device("cuda")))
    done: dict[tuple[str, int, int], tuple[Stream, int]] = {}
    free, handed, used = 0, mock.Mock(spec=Tensor), set[Stream]()

    def carry_out(action: Action) -> None:
        nonlocal free
        here = current[-1]
        used.add(here)
        kind = "F" if action.op == "F" else "B"
        before = (kind, action.stage + (-1 if kind == "F" else 1), action.microbatch)
        if action.op != "W" and before in done:
            stream, position = done[before]
            assert here.seen.get(id(stream), 0) >= position, f"{action} does not wait for {before}"
        free += any(here.seen.get(id(other), 0) < len(other.work) for other in used)
        here.work.append(action)
        done[kind, action.stage, action.microbatch] = here, len(here.work)

    run: Any = mock.Mock(kind="training", stages=stages(nn.Linear(1, 1), nn.Linear(1, 1)))
    run.list_inputs_from_local_stage = lambda _action: [handed]
    operations = feature.start_run(run, dict.fromkeys(OPS, carry_out))
    for action in iterate_actions(DualPipeV().program(1, 6).rank_program(0)):
        operations[action.op](action)
    feature.end_run(run)
    assert free and handed.record_stream.call_count == 12  # forward and backward of six microbatches
    assert len(used) == 2 and all(current[0].seen[id(stream)] == len(stream.work) for stream in used)


def test_evaluation_stays_in_one_stream(current: list[Stream]) -> None:
    """Forward passes alone have nothing to overlap."""
    operations: dict[str, Any] = {"F": print}
    feature = ConcurrentStages(device=mock.Mock(device=torch.device("cuda")))
    assert feature.start_run(mock.Mock(kind="evaluation"), operations) is operations


def test_stages_that_share_parameters_share_a_stream() -> None:
    """The gradient of a tied weight is written by one stream."""
    tied = nn.Linear(2, 2)
    streams = create_streams(stages(nn.Sequential(tied), nn.Linear(2, 2), nn.Sequential(tied)), Stream)
    assert len({id(stream) for stream in streams.values()}) == 1
    apart = create_streams(stages(nn.Linear(2, 2), nn.Linear(2, 2)), Stream)
    assert apart[0] is not apart[1]


CIRCULAR = ("schedule.use=pipeline.schedules.circular", "executor.use=pipeline.circular.executor")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("device.kind=cpu",), "the device is the CPU"),
        (("capture.use=pipeline.captured",), "CUDA graphs for passes share memory"),
        (("offload.use=pipeline.offloaded",), "freed on another stream than they were allocated on"),
        (CIRCULAR, "acts around a program"),
    ],
)
def test_check_refuses_streams_without_concurrent_passes(words: tuple[str, ...], why: str) -> None:
    """Streams are refused on a CPU, with passes that share memory or copy activations, and without a program."""
    assert drawloom.Recipe.load("pipeline", "streams.use=pipeline.streams").graph.problems == ()
    problems = drawloom.Recipe.load("pipeline", "streams.use=pipeline.streams", *words).graph.problems
    assert [why in str(problem) for problem in problems] == [True]


def test_check_names_the_new_place_of_streams() -> None:
    """The executor's former setting is explained by its new table."""
    (problem,) = drawloom.Recipe.load("pipeline", "executor.streams=true").graph.problems
    assert 'write a table [streams] with use = "pipeline.streams"' in str(problem)
