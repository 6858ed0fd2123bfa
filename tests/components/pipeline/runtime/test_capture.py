"""Passes that are recorded once and replayed: with a stand-in for CUDA graphs that computes again what it recorded."""

import logging
from collections.abc import Callable
from itertools import cycle
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.capture import Captures, WeightSums
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.pipeline import state_of_batches
from drawloom.components.state.step_state import StepState
from drawloom.components.state.trees import leaves
from drawloom.graph import UserError
from drawloom.kernels import recompute_policy
from drawloom.kernels.recompute import rerun
from support import pipelines
from support.processes import run_ranks


@attrs.define
class Again:
    """Computes a function again, and writes what it gives to where the first results are; as a graph would."""

    run: Callable[[], Any]
    outputs: Any

    def replay(self) -> None:
        """Run it, which on a GPU recording has not done, and write what it gives."""
        for there, here in zip(leaves(self.outputs), leaves(self.run()), strict=True):
            if isinstance(there, Tensor):
                there.data.copy_(here)


class Recorder:
    """Counts the slots, and what is recorded."""

    def __init__(self) -> None:
        self.slots = self.recorded = self.running = 0

    def new(self) -> Callable[[Callable[[], Any]], Again]:
        """What records in a slot."""
        self.slots += 1
        return self.record

    def record(self, run: Callable[[], Any]) -> Again:
        """A recorded function."""
        self.recorded += 1
        return Again(run, run())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of CUDA graphs in every executor."""
    found = Recorder()
    monkeypatch.setattr(Captures, "on", lambda _device, objective: Captures(objective, found.new))
    return found


def steps(cases: list[pipelines.Case], capture: bool, lengths: tuple[int, int] = (6, 0), **how: Any) -> Any:
    """What the last of three steps leaves."""
    how = {"dtypes": {"parameter": "float32"}, "taken": 3, "layers": 4, **how}
    return pipelines.steps(cases, lengths=lengths, settings={"capture": capture}, **how)


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Losses, sums, gradients and weights have the same bits."""
    for key in ("loss", "sums", "norm", "held_out"):
        assert found[key] == plain[key], key
    for what in ("grads", "weights"):
        assert found[what].keys() == plain[what].keys()
        for name, tensor in found[what].items():
            other = plain[what][name]
            assert tensor is other is None or torch.equal(tensor, other), (what, name)


CASES: list[pipelines.Case] = [
    ("one_f_one_b", 4, True, False, "smoothed"),
    ("gpipe", 3, False, True, "tempered"),
    ("zero_bubble_1p", 4, True, False, "plain"),
    ("zero_bubble_v", 3, False, False, "states"),
    ("dual_pipe_v", 4, False, False, "dft"),
]


@pytest.mark.parametrize("how", [{}, {"experts": 4}, {"dtypes": pipelines.MIXED, "recompute": ["selective"]}], ids=str)
def test_replayed_passes_have_the_bits_of_passes_that_run(recorder: Recorder, how: Any) -> None:
    """Three steps, with several microbatches in flight, split backward passes, shared weights and sums of losses."""
    for found, plain in zip(steps(CASES, True, **how), steps(CASES, False, **how), strict=True):
        assert_same(found, plain)
    assert recorder.recorded > 0


def test_captured_passes_recompute_what_the_program_says(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the model was evaluated before its first step: both blocks of one stage run again in each step."""
    ran: list[Any] = []

    def counted(*given: Any, **named: Any) -> Any:
        ran.append(given)
        return rerun(*given, **named)

    def after_evaluation(executor: ProgramExecutor, state: StepState) -> None:
        executor.evaluate(state_of_batches(state["batches"]))
        train(executor, state)

    train = ProgramExecutor.train
    monkeypatch.setattr(recompute_policy, "rerun", counted)
    monkeypatch.setattr(ProgramExecutor, "train", after_evaluation)
    program = pipelines.Recomputing(pipelines.schedule("zero_bubble_v"), ("none", "blocks"))
    steps([(program, 3, False, False, "plain")], True)
    assert recorder.recorded > 0 and len(ran) >= 3 * 3 * 2


def captured_steps(cases: list[pipelines.Case], capture: bool, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """In a process of its own, which has stand-ins for CUDA graphs."""
    found = Recorder()
    with mock.patch.object(Captures, "on", lambda _device, objective: Captures(objective, found.new)):
        steps_of_rank: list[dict[str, Any]] = steps(cases, capture, sizes=sizes)
    assert bool(found.recorded) == capture
    return steps_of_rank


@pytest.mark.parametrize("sizes", [{}, {"data_replicate": 2}], ids=["pipeline", "replicas"])
def test_replayed_passes_over_two_ranks_have_the_bits_of_passes_that_run(sizes: dict[str, int]) -> None:
    """Messages come from and go to other ranks, and to stages of the same rank; replicas sum after the last pass."""
    found_by = [run_ranks(captured_steps, 2, CASES, each, sizes, timeout=120) for each in (True, False)]
    for ours, theirs in zip(*found_by, strict=True):
        for found, plain in zip(ours, theirs, strict=True):
            assert_same(found, plain)


def test_microbatches_in_flight_have_slots_of_their_own(recorder: Recorder) -> None:
    """One after the other they take turns in one slot, of which each pass is recorded once."""
    steps([("one_f_one_b", 4, True, False, "plain")], True)
    assert (recorder.slots, recorder.recorded) == (1, 2)
    steps([("gpipe", 4, True, False, "plain")], True)
    assert (recorder.slots - 1, recorder.recorded - 2) == (4, 8)


def test_other_shapes_run_and_are_logged_once(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of several lengths: only those like the first microbatch are recorded, and the numbers are right."""
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        (found,) = steps([CASES[0]], True, (4, 1))
    assert_same(found, steps([CASES[0]], False, (4, 1))[0])
    assert [record.message for record in caplog.records] == [
        "capture: stage 0 gets microbatches of several shapes, and only those of the first are launched as CUDA graphs"
    ]
    assert recorder.recorded == 2


def test_rows_of_one_document_are_captured_as_packed_ones(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed data now and then a row is one document: its microbatch is launched as a graph as all others are."""
    every = cycle([False, True])
    monkeypatch.setattr(TokenBatch, "has_whole_rows", lambda _batch: next(every))
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        steps([CASES[0]], True)
    assert not caplog.records and recorder.recorded == 2


def test_a_pass_that_can_not_be_recorded_is_said_in_words(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that waits for the GPU: the error names the stage and what to write."""

    def record(_run: Callable[[], Any]) -> Again:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorder, "record", record)
    with pytest.raises(UserError, match=r"stage 0 .* operation not permitted .*capture = false"):
        steps([CASES[0]], True)


def test_sums_begin_at_zero_or_at_what_is_there() -> None:
    """The same tensor in each step; nothing that somebody left in a gradient is lost."""
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 5.0)
    sums = WeightSums()
    sums.adopt([weight, unused])
    kept, weight.grad = weight.grad, None
    sums.attach()
    sums.reset()
    assert weight.grad is kept and not kept.any() and unused.grad is None
    weight.grad = torch.full((3,), 2.0)
    sums.attach()
    sums.reset()
    assert weight.grad is kept and kept.tolist() == [2.0] * 3


def test_after_whole_rows_graphs_are_made_anew_for_packed_ones(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs know that rows are one document each until there are others, and are then recorded again, once."""
    monkeypatch.setattr(TokenBatch, "has_whole_rows", lambda _batch: recorder.recorded == 0)
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        (found,) = steps([CASES[0]], True, step_count=6)
    assert not caplog.records and recorder.recorded == 4
    assert_same(found, steps([CASES[0]], False, step_count=6)[0])
