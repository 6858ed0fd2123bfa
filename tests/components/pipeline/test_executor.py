"""Programs carried out on a rank's stages."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.features import WrappingOrder
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, TokenContext
from drawloom.components.ports.pipeline import (
    Operation,
    PassFeature,
    PassRun,
    create_step_state,
    sum_losses_and_weights,
)
from drawloom.components.ports.program import Action, Op, Program
from drawloom.components.ports.stages import Stage
from drawloom.kernels.recompute.marks import is_recomputing
from support import pipelines
from support.doubles import Machine, PlainStages
from support.processes import run_ranks
from support.steps import evaluate, train


class Squares:
    """A loss that sums squared outputs; tokens weigh 1."""

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "positions", "document_ids", "weights")

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, BatchContext]:
        return batch.tokens.double(), TokenContext(batch.positions, batch.document_ids)

    def loss(self, hidden: Tensor, head: Any, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return hidden.square().sum(), batch.weights.sum(), {"tokens": torch.tensor(batch.tokens.numel())}


class SameAsHidden:
    """A head whose logits are the hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


HEAD: Any = SameAsHidden()


class Scale(nn.Module):
    """A stage that multiplies by a weight; `seen` has weak references to its outputs."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
        self.seen: list[Any] = []
        self.fail_on = -1

    def forward(self, inputs: Tensor, shared: BatchContext, finish: Finish | None = None) -> Any:
        if len(self.seen) == self.fail_on:
            raise RuntimeError("broken")
        output = inputs * self.weight
        self.seen.append(ref(output))
        return output if finish is None else finish(output, HEAD)


@attrs.frozen(eq=False)
class Local(PlainStages):
    """Stages of this rank."""

    local: list[Stage]


class BreadthFirst:
    """All forwards stage by stage, then all backwards, as a whole or in two parts; on one rank."""

    def __init__(self, stages: int, split: bool) -> None:
        self.stages_per_rank = stages
        self.split = split

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return (0,) * self.stages_per_rank

    def program(self, ranks: int, microbatches: int) -> Program:
        stages = range(self.stages_per_rank)
        forwards = [Action(stage, "F", number) for stage in stages for number in range(microbatches)]
        order = [(stage, number) for stage in reversed(stages) for number in range(microbatches)]
        works: list[Op] = ["I", "W"] if self.split else ["B"]
        backwards = [Action(stage, work, number) for work in works for stage, number in order]
        return Program.from_rank_programs([[*forwards, *backwards]], self.stage_to_rank(ranks))


def batches(count: int) -> list[TokenBatch]:
    """Microbatches of different shapes."""
    tokens = [torch.arange(1, 3 + number).unsqueeze(0) for number in range(count)]
    return [TokenBatch(part, part, part, torch.zeros_like(part), torch.ones(part.shape)) for part in tokens]


def open_executor(
    modules: Sequence[Scale], mesh: Any, split: bool = False, features: Sequence[PassFeature] = ()
) -> ProgramExecutor:
    """Return an open executor for one rank with all stages."""
    spans = [LayerRange(number, number + 1, number == 0, number == len(modules) - 1) for number in range(len(modules))]
    local = Local([Stage(number, len(modules), spans[number], module) for number, module in enumerate(modules)])
    schedule = BreadthFirst(len(modules), split)
    parts: dict[str, Any] = {"stages": local, "schedule": schedule}
    executor = ProgramExecutor(objective=Squares(), mesh=mesh, device=Machine(), features=[*features], **parts)
    executor.open()
    return executor


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("weights", [(3.0,), (2.0, 1.5), (2.0, 1.5, 0.5)])
def test_gradients_and_losses_equal_the_whole_model(weights: tuple[float, ...], split: bool, one_rank: Any) -> None:
    """For any number of stages on a rank, losses and gradients are sums over the microbatches of the chained model."""
    modules = [Scale(weight) for weight in weights]
    total, weight = sum_losses_and_weights(train(open_executor(modules, one_rank, split), batches(3))).tolist()
    squares = sum(float(batch.tokens.square().sum()) for batch in batches(3))
    whole = torch.tensor(weights).prod().item()
    assert total == pytest.approx(squares * whole**2)
    assert weight == sum(batch.tokens.numel() for batch in batches(3))
    for module, scale in zip(modules, weights, strict=True):
        assert module.weight.grad is not None
        assert float(module.weight.grad) == pytest.approx(2 * squares * whole**2 / scale)


@pytest.mark.parametrize("split", [False, True])
def test_nothing_outlives_the_pass(split: bool, one_rank: Any) -> None:
    """No output of a stage is alive once the pass is over."""
    modules = [Scale(2.0), Scale(1.5)]
    train(open_executor(modules, one_rank, split), batches(2))
    assert [output() for module in modules for output in module.seen] == [None] * 4


def test_a_repetition_computes_the_same_and_is_marked(one_rank: Any) -> None:
    """Losses and gradients equal the trained ones, and modules see a recomputation."""
    module, marks = Scale(2.0), list[bool]()
    module.register_forward_pre_hook(lambda _module, _inputs: marks.append(is_recomputing()))
    executor = open_executor([module], one_rank)
    trained, first = train(executor, batches(2)), module.weight.grad
    module.weight.grad, state = None, create_step_state(batches(2))
    executor.rerun_passes_for_comparison(state)
    assert first is not None and module.weight.grad is not None and torch.equal(module.weight.grad, first)
    assert torch.equal(sum_losses_and_weights(state), sum_losses_and_weights(trained)) and marks == [
        False,
        False,
        True,
        True,
    ]


def test_evaluation_leaves_no_gradient_and_adds_up_in_float64(one_rank: Any) -> None:
    """Evaluation gives the losses of training, and no gradient."""
    modules = [Scale(2.0), Scale(1.5)]
    executor = open_executor(modules, one_rank)
    evaluated = sum_losses_and_weights(evaluate(executor, batches(3)))
    assert all(module.weight.grad is None for module in modules)
    trained = sum_losses_and_weights(train(executor, batches(3)))
    assert evaluated.dtype == torch.float64 and torch.equal(evaluated, trained)


def test_inference_gives_the_output_itself(one_rank: Any) -> None:
    """The output of the last stage comes back as it is, without a loss."""
    tokens = torch.ones(1, 3, dtype=torch.float64)
    output = open_executor([Scale(2.0), Scale(1.5)], one_rank).infer(tokens, TokenContext(tokens, tokens))
    assert output is not None and output.tolist() == [[3.0, 3.0, 3.0]]


class Notes(PassFeature):
    """A feature to note runs and actions under its position in the order."""

    def __init__(self, order: WrappingOrder, notes: list[str]) -> None:
        self.order = order  # type: ignore[misc]
        self.notes = notes

    def note(self, text: str) -> None:
        self.notes.append(f"{self.order.name} {text}")

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        self.note(run.kind)

        def run_noted(operation: Operation, action: Action) -> None:
            self.note(str(action))
            operation(action)

        return {op: partial(run_noted, operation) for op, operation in operations.items()}

    def end_run(self, run: PassRun) -> None:
        self.note("end")


def test_features_wrap_every_run_in_their_order(one_rank: Any) -> None:
    """The last in the order is the outermost: it acts first in each action, and ends first; no run is left out."""
    notes: list[str] = []
    features = [Notes(order, notes) for order in (WrappingOrder.LAUNCH, WrappingOrder.LAYERS)]
    executor = open_executor([Scale(2.0)], one_rank, features=features)
    train(executor, batches(1))
    around = [f"{name} {action}" for action in ("0F0", "0B0") for name in ("LAUNCH", "LAYERS")]
    assert notes == ["LAYERS training", "LAUNCH training", *around, "LAUNCH end", "LAYERS end"]
    notes.clear()
    evaluate(executor, batches(1))
    tokens = torch.tensor([[3.0]])
    executor.infer(tokens, TokenContext(tokens, tokens))
    kinds = [note.removeprefix("LAUNCH ") for note in notes if note.startswith("LAUNCH")]
    assert kinds == ["evaluation", "0F0", "end", "inference", "0F0", "end"]


def test_a_failing_stage_is_named_and_the_next_step_works(one_rank: Any) -> None:
    """The exception names stage and microbatch, and nothing remains of the failed step."""
    modules = [Scale(2.0), Scale(1.5)]
    executor = open_executor(modules, one_rank)
    modules[1].fail_on = 1
    with pytest.raises(RuntimeError, match="broken") as caught:
        train(executor, batches(3))
    assert "at 1F1: stage 1, microbatch 1" in caught.value.__notes__[0]
    modules[1].fail_on = -1
    for module in modules:
        module.weight.grad = None
    assert sum_losses_and_weights(train(executor, batches(1)))[1] == 2


MIDDLE_RANKS = ("one_f_one_b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v", "circular")
"""Schedules on four ranks, two in the middle; all schedules run on two."""

CASES: dict[int, list[pipelines.Case]] = {
    2: [
        *((name, 1, True, False, "dft") for name in ("gpipe", "zero_bubble_v", "dual_pipe_v", "circular")),
        *((name, 5, True, False, "tempered") for name in pipelines.TRAINING),
        *((name, 4, False, False, "states") for name in ("one_f_one_b", "zero_bubble_v", "circular")),
        *((name, 6, True, False, "smoothed") for name in ("gpipe", "interleaved_1f1b", "zero_bubble_v")),
    ],
    4: [(name, 8, False, True, "plain") for name in MIDDLE_RANKS],
}
LAYERS = {2: 4, 4: 8}
"""Of the model, by the number of ranks: as few as all schedules take."""


@pytest.fixture(scope="module")
def parts() -> dict[int, list[list[dict[str, Any]]]]:
    """Return all ranks' results after the steps of all cases, by rank count."""
    common: tuple[Any, ...] = {}, "cpu", pipelines.FLOAT64, 1
    return {
        ranks: run_ranks(pipelines.steps, ranks, cases, *common, LAYERS[ranks], timeout=120)
        for ranks, cases in CASES.items()
    }


@pytest.fixture(scope="module")
def wholes() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the same steps in one process."""
    steps_by_case: dict[tuple[Any, ...], dict[str, Any]] = {}
    for ranks, theirs in CASES.items():
        cases = sorted({("gpipe", *case[1:]) for case in theirs})
        steps = pipelines.steps(cases, layers=LAYERS[ranks])
        steps_by_case |= {case[1:]: step for case, step in zip(cases, steps, strict=True)}
    return steps_by_case


REPLICATED: list[pipelines.Case] = [(name, 6, True, False, "smoothed") for name in ("one_f_one_b", "zero_bubble_v")]


def test_replicas_of_a_pipeline_have_the_gradients_of_one_process(wholes: Any) -> None:
    """Two pipelines with two ranks and half the microbatches apiece agree with one process in float64."""
    common = {"data_replicate": 2}, "cpu", pipelines.FLOAT64, 1
    parts = run_ranks(pipelines.steps, 4, REPLICATED, *common, LAYERS[2], timeout=120)
    for number, case in enumerate(REPLICATED):
        whole, mine = wholes[case[1:]], [steps[number] for steps in parts]
        assert sum(part["loss"] for part in mine) == pytest.approx(whole["loss"], rel=1e-12), case
        assert sum(part["held_out"] for part in mine) == pytest.approx(whole["held_out"], rel=1e-12), case
        assert {name for part in mine for name in part["grads"]} == whole["grads"].keys()
        for part in mine:
            for parameter, grad in part["grads"].items():
                torch.testing.assert_close(grad, whole["grads"][parameter], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("ranks", "case_index"), [(ranks, n) for ranks in CASES for n in range(len(CASES[ranks]))])
def test_ranks_have_the_gradients_and_losses_of_one_process(
    ranks: int, case_index: int, parts: Any, wholes: Any
) -> None:
    """This holds for any schedule, number of microbatches and lengths, with tied and frozen weights, to 1e-12."""
    case = CASES[ranks][case_index]
    whole, mine = wholes[case[1:]], [steps[case_index] for steps in parts[ranks]]
    assert sum(part["loss"] for part in mine) == pytest.approx(whole["loss"], rel=1e-12), case
    assert sum(part["held_out"] for part in mine) == pytest.approx(whole["held_out"], rel=1e-12), case
    assert {name for part in mine for name in part["grads"]} == whole["grads"].keys()
    for part in mine:
        assert part["sums"] in ({}, pytest.approx(whole["sums"], rel=1e-6)), case
        for parameter, grad in part["grads"].items():
            expected = whole["grads"][parameter]
            assert (grad is None) == (expected is None), (case, parameter)
            if grad is not None:
                torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_outputs_are_handed_out_one_by_one(one_rank: Any) -> None:
    """Each microbatch's output comes as soon as it is there, in order, and none is kept."""
    modules = [Scale(2.0), Scale(1.5)]
    tokens = [torch.full((1, 2), float(number), dtype=torch.float64) for number in range(3)]
    seen: list[tuple[int, list[list[float]], int]] = []

    def look(number: int, output: Tensor) -> None:
        seen.append((number, output.tolist(), sum(reference() is not None for reference in modules[1].seen[:-1])))

    open_executor(modules, one_rank).infer_microbatches([(part, TokenContext(part, part)) for part in tokens], look)
    assert seen == [(number, [[3.0 * number] * 2], 0) for number in range(3)]
