"""Recorded and replayed passes: a stand-in for CUDA graphs repeats the recorded computation."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.overlap.shard_copies import CopiedShards
from drawloom.components.pipeline.captured import CapturedPasses, GradientSums
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.pipeline import create_step_state
from drawloom.components.state.step_state import StepState
from drawloom.graph import Every, UserError
from drawloom.kernels.recompute import repeated_calls
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from support import pipelines
from support.processes import run_ranks
from support.recorders import Again, Recorder, use_recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Take the place of CUDA graphs in every executor."""
    with use_recorder() as graph_recorder:
        yield graph_recorder


def steps(
    cases: list[pipelines.Case],
    capture: bool,
    lengths: tuple[int, int] = (6, 0),
    around: Sequence[Any] = (),
    **how: Any,
) -> Any:
    """Return the results of the last of three steps, with the features `around` if they are recorded."""
    how = {"dtypes": {"parameter": "float32"}, "step_count": 3, "layers": 4, **how}
    return pipelines.steps(cases, lengths=lengths, features=[*around, CapturedPasses] if capture else [], **how)


def assert_same(actual: dict[str, Any], plain: dict[str, Any]) -> None:
    """Losses, sums, gradients and weights have the same bits."""
    for key in ("loss", "sums", "norm", "held_out"):
        assert actual[key] == plain[key], key
    for what in ("grads", "weights"):
        assert actual[what].keys() == plain[what].keys()
        for name, tensor in actual[what].items():
            other = plain[what][name]
            assert tensor is other is None or torch.equal(tensor, other), (what, name)


CASES: list[pipelines.Case] = [
    ("one_f_one_b", 4, True, False, "smoothed"),
    ("gpipe", 3, False, True, "tempered"),
    ("zero_bubble_1p", 4, True, False, "plain"),
    ("zero_bubble_v", 3, False, False, "states"),
    ("dual_pipe_v", 4, False, False, "dft"),
]


@pytest.mark.parametrize(
    ("cases", "how"),
    [
        (CASES, {}),
        (CASES[2:3], {"experts": 4}),
        (CASES[:3:2], {"dtypes": pipelines.MIXED, "recompute": ["selective", "quantized"]}),
    ],
    ids=["all losses", "experts", "recomputation"],
)
def test_replayed_passes_have_the_bits_of_passes_that_run(
    recorder: Recorder, cases: list[pipelines.Case], how: Any
) -> None:
    """Three steps, with several microbatches in flight, split backward passes, shared weights and sums of losses."""
    for replayed, plain in zip(steps(cases, True, **how), steps(cases, False, **how), strict=True):
        assert_same(replayed, plain)
    assert recorder.recorded > 0


def test_captured_passes_recompute_as_the_program_says(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both blocks in one stage are recomputed in every step, even if the model was evaluated before its first step."""
    ran: list[Any] = []

    def count_and_rerun(*given: Any, **named: Any) -> Any:
        ran.append(given)
        return call_with_recomputation(*given, **named)

    def after_evaluation(executor: ProgramExecutor, state: StepState) -> None:
        executor.evaluate(create_step_state(state["batches"]))
        train(executor, state)

    train = ProgramExecutor.run_forward_and_backward
    monkeypatch.setattr(repeated_calls, "call_with_recomputation", count_and_rerun)
    monkeypatch.setattr(ProgramExecutor, "run_forward_and_backward", after_evaluation)
    program = pipelines.Recomputing(pipelines.schedule("zero_bubble_v"), ("none", "blocks"))
    steps([(program, 3, False, False, "plain")], True)
    assert recorder.recorded > 0 and len(ran) >= 3 * 3 * 2


MESHES: dict[str, tuple[list[pipelines.Case], dict[str, Any]]] = {
    "pipeline": (CASES, {}),
    "replicas": (CASES[2:4], {"sizes": {"data_replicate": 2}, "layers": 2}),
    "shards": ([*CASES[:3], ("gpipe", 2, False, False, "measured")], {"sizes": {"data_shard": 2}, "layers": 2}),
    "once": (CASES[:1], {"sizes": {"data_shard": 2}, "layers": 2, "settings": {"reshard_after_forward": False}}),
    "copies": (CASES[:1], {"sizes": {"data_shard": 2}, "layers": 2, "around": [CopiedShards]}),
    "several lengths": (CASES[:1], {"sizes": {"data_shard": 2}, "layers": 2, "lengths": (4, 1)}),
    "context": (CASES[:2], {"sizes": {"context": 2}, "layers": 2}),
    "tensor": (CASES[:2], {"sizes": {"tensor": 2}, "layers": 2}),
    "experts": (
        [("gpipe", 4, False, False, "symmetric")],
        {"sizes": {"data_shard": 2, "expert": 2}, "layers": 2, "experts": 4},
    ),
}


def run_meshes_with_and_without_graphs() -> dict[str, list[list[dict[str, Any]]]]:
    """Run the cases on each mesh in a separate process, with stand-ins for CUDA graphs and without graphs."""
    steps_by_mesh = {}
    for mesh, (cases, how) in MESHES.items():
        with use_recorder() as graph_recorder:
            steps_by_mesh[mesh] = [steps(cases, True, **how)]
            recorded = graph_recorder.recorded
            steps_by_mesh[mesh].append(steps(cases, False, **how))
        assert 0 < recorded == graph_recorder.recorded
    return steps_by_mesh


@pytest.fixture(scope="module")
def steps_on_two_ranks() -> list[dict[str, list[list[dict[str, Any]]]]]:
    """Return both ranks' steps on every mesh, in shared processes because starting takes longer than the steps."""
    return run_ranks(run_meshes_with_and_without_graphs, 2, timeout=240)


@pytest.mark.parametrize("mesh", MESHES)
def test_replayed_passes_over_two_ranks_have_the_bits_of_passes_that_run(mesh: str, steps_on_two_ranks: Any) -> None:
    """Messages come from and go to other ranks, and to stages of the same rank; the last passes reduce gradients."""
    for steps_by_mesh in steps_on_two_ranks:
        for replayed, plain in zip(*steps_by_mesh[mesh], strict=True):
            assert_same(replayed, plain)


def test_microbatches_in_flight_have_slots_of_their_own(recorder: Recorder) -> None:
    """Microbatches one after the other take turns in one slot, and its passes are recorded once."""
    steps([("one_f_one_b", 4, True, False, "plain")], True)
    assert (recorder.slots, recorder.recorded) == (1, 2)
    steps([("gpipe", 4, True, False, "plain")], True)
    assert (recorder.slots - 1, recorder.recorded - 2) == (4, 8)


def test_more_room_for_experts_is_recorded_anew(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A graph has the room for rows of its recording, so graphs of steps before the growth are not used again, and are
    freed although their runners live: the end of a communicator waits for graphs that refer to it.
    """
    room = iter([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])

    class Growing:
        """A dispatcher whose fourth step has more room."""

        @property
        def graph_values(self) -> object:
            return next(room)

        def grow_if_rows_were_dropped(self) -> bool:
            return False

    def feature(device: Any) -> CapturedPasses:
        return CapturedPasses(device=device, limits=Every(dispatcher=Growing()))

    runners, living, wrap = [], [], CapturedPasses._wrap

    def keep_runner(*arguments: Any) -> Any:
        runners.append(wrap(*arguments))
        gc.collect()  # a stand-in refers to itself
        living.append(len(recorder.living))
        return runners[-1]

    monkeypatch.setattr(CapturedPasses, "_wrap", keep_runner)
    pipelines.steps([("gpipe", 1, False, False, "plain")], step_count=6, layers=2, features=[feature])
    assert (recorder.slots, recorder.recorded) == (2, 4)
    assert living[:6] == [0, 2, 2, 0, 2, 2]


def test_other_shapes_run_and_are_logged_once(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    """With rows of several lengths, only microbatches shaped like the first are recorded, and all numbers are right."""
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        (replayed,) = steps([CASES[0]], True, (4, 1))
    assert_same(replayed, steps([CASES[0]], False, (4, 1))[0])
    assert [record.message for record in caplog.records] == [
        "capture: stage 0 gets microbatches of several shapes, and only those of the first are launched as CUDA graphs"
    ]
    assert recorder.recorded == 2


def test_rows_of_one_document_are_captured_as_packed_ones(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a packed row happens to be one document, its microbatch is launched as a graph like all others."""
    every = cycle([False, True])
    monkeypatch.setattr(TokenBatch, "has_one_document_per_row", lambda _batch: next(every))
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        steps([CASES[0]], True)
    assert not caplog.records and recorder.recorded == 2


def test_a_pass_that_cannot_be_recorded_is_explained(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pass waits for the GPU, for example, the error names the stage and the remedy."""

    def record(_run: Callable[[], Any]) -> Again:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorder, "record", record)
    with pytest.raises(UserError, match=r"stage 0 .* operation not permitted .*remove the table"):
        steps([CASES[0]], True)


def test_sums_start_at_zero_or_the_existing_gradient() -> None:
    """All steps use the same tensor; a gradient already there is not lost."""
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 5.0)
    sums = GradientSums()
    sums.adopt_gradients([weight, unused])
    kept, weight.grad = weight.grad, None
    sums.attach_to_parameters()
    sums.restore_or_zero_sums()
    assert weight.grad is kept and not kept.any() and unused.grad is None
    weight.grad = torch.full((3,), 2.0)
    sums.attach_to_parameters()
    sums.restore_or_zero_sums()
    assert weight.grad is kept and kept.tolist() == [2.0] * 3


def test_after_whole_rows_graphs_are_made_anew_for_packed_ones(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for one-document rows are recorded again, once, when packed rows come."""
    monkeypatch.setattr(TokenBatch, "has_one_document_per_row", lambda _batch: recorder.recorded == 0)
    with caplog.at_level(logging.WARNING, "drawloom.pipeline"):
        (replayed,) = steps([CASES[0]], True, step_count=6)
    assert not caplog.records and recorder.recorded == 4
    assert_same(replayed, steps([CASES[0]], False, step_count=6)[0])
