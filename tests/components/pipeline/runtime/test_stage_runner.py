"""Stages with difficult backward passes, on a step's microbatches under all kinds of schedules."""

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, TokenContext
from drawloom.components.ports.pipeline import STEP_SPECS, sum_losses_and_weights
from drawloom.components.ports.program import Action, Program, iterate_actions
from drawloom.components.ports.stages import Stage
from drawloom.components.state.step_state import StepState
from support import pipelines
from support.doubles import PlainStages
from support.split_passes import pop_grads
from support.split_stages import STAGES, WIDTH, Parts
from support.steps import train


def test_a_loss_of_another_form_is_named() -> None:
    """A mean alone, common in other frameworks, is refused with the class and the required form."""

    class Mean:
        def loss(self, *_: Any) -> Tensor:
            return torch.zeros(())

    class EndOnly(nn.Module):
        def forward(self, hidden: Any, shared: Any, finish: Finish) -> Any:
            return finish(hidden, NO_HEAD)

    stage: Any = SimpleNamespace(index=0, count=1, recompute="none", module=EndOnly())
    objective: Any = Mean()
    batch: Any = object()
    with pytest.raises(TypeError, match=r"Mean\.loss returns a Tensor; return a tensor with the sum"):
        StageRunner(stage, objective).forward(0, None, NO_HEAD, batch)


pytestmark = pytest.mark.usefixtures("float64")


NO_HEAD: Any = None
"""Losses here need none."""


class Block(nn.Module):
    """A stage that changes activations (2, 4, WIDTH); `late` is a parameter added later."""

    def __init__(self, name: str, ours: bool) -> None:
        super().__init__()
        self.late: nn.Parameter | None = None
        make, _ = STAGES[name]
        self.stage = make(Parts("ours" if ours else "torch"))

    def forward(self, inputs: Tensor, shared: BatchContext, finish: Finish | None = None) -> Any:
        (output,) = self.stage(inputs if self.late is None else inputs * self.late)
        return output if finish is None else finish(output, NO_HEAD)


class Fourier(Block):
    """A stage with complex activations; only the first input and the last output are real."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__("residual", ours=number % 2 == 0)
        self.first, self.last = number == 0, number == count - 1
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, inputs: Tensor, shared: BatchContext, finish: Finish | None = None) -> Any:
        real = inputs if self.first else torch.view_as_real(inputs).sum(-1)
        output = super().forward(real, shared, finish)
        return output if self.last else output * self.turn


class Distance(nn.Module):
    """A loss with parameters, and with a trained tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.center = [torch.randn(WIDTH, requires_grad=True)]

    batch_leaves: ClassVar[tuple[str, ...]] = ("tokens", "positions", "document_ids")

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, BatchContext]:
        return batch.tokens, TokenContext(batch.positions, batch.document_ids)

    def loss(self, hidden: Tensor, head: Any, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        away = self.mix(hidden) * self.scale - self.center[0]
        return away.square().mean(), torch.tensor(1), {}


@attrs.frozen
class SingleRank(PlainStages):
    """All stages, and no neighbours."""

    local: list[Stage]
    device: torch.device = torch.device("cpu")
    backend: str = "gloo"
    shares_gpu: bool = False

    def make_current(self) -> None:
        pass

    def get_peak_memory_so_far(self) -> int:
        return 0


class Folded:
    """A schedule's program for two ranks, whose lines one rank carries out in turns."""

    def __init__(self, name: str) -> None:
        self.schedule = pipelines.schedule(name)
        self.stages: int = len(self.schedule.stage_to_rank(2))

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return (0,) * self.stages

    def program(self, ranks: int, microbatches: int) -> Program:
        program = self.schedule.program(2, microbatches)
        lines = [deque(iterate_actions(program.rank_program(rank))) for rank in range(2)]
        folded: list[Action] = []
        while any(lines):
            for line in lines:
                if line and self._may_follow(line[0], folded):
                    folded.append(line.popleft())
        return Program.from_rank_programs([folded], self.stage_to_rank(1))

    def _may_follow(self, action: Action, done: list[Action]) -> bool:
        """Return whether the input from another stage exists."""
        ops, before, ends = ("F", -1, 0) if action.op == "F" else ("BI", 1, self.stages - 1)
        if action.op == "W" or action.stage == ends:
            return True
        needed = action.stage + before, action.microbatch
        return any((earlier.stage, earlier.microbatch) == needed and earlier.op in ops for earlier in done)


def executor_of(modules: Sequence[nn.Module], schedule: Any, objective: Any, mesh: Any) -> ProgramExecutor:
    """Return an open executor of one rank with these stages."""
    count = len(modules)
    spans = [LayerRange(number, number + 1, number == 0, number == count - 1) for number in range(count)]
    pairs = zip(spans, modules, strict=True)
    rank: Any = SingleRank([Stage(span.first, count, span, module) for span, module in pairs])
    parts: dict[str, Any] = {"stages": rank, "device": rank, "mesh": mesh}
    executor = ProgramExecutor(objective=objective, schedule=schedule, **parts)
    executor.open()
    return executor


def batches(count: int) -> list[TokenBatch]:
    """Microbatches whose tokens are activations already."""
    rows = [torch.randn(2, 4, WIDTH) for _ in range(count)]
    return [TokenBatch(row, row, row, row, torch.ones(row.shape[:-1])) for row in rows]


def same_as_one_pass(executor: ProgramExecutor, microbatches: list[TokenBatch], leaves: list[Tensor]) -> None:
    """Compare a step's gradients with plain autograd through all stages."""
    for batch in microbatches:
        output, shared = executor.objective.inputs(batch)
        for stage in executor.stages.local:
            output = stage.module(output, shared)
        torch.autograd.backward(executor.objective.loss(output, NO_HEAD, batch)[0])
    expected = pop_grads(leaves)
    train(executor, microbatches)
    torch.testing.assert_close(pop_grads(leaves), expected, rtol=1e-10, atol=1e-12)


def test_schedules_are_split() -> None:
    """All but one of the tested schedules split the backward pass in two."""
    lines = {name: lower_to_rank_program(Folded(name).program(1, 3), 0) for name in SCHEDULES}
    split = {name: sum(action.op == "I" for action in iterate_actions(line)) for name, line in lines.items()}
    assert [name for name in SCHEDULES if not split[name]] == ["one_f_one_b"]


SCHEDULES = ["one_f_one_b", "zero_bubble_1p", "zero_bubble_v", "dual_pipe_v"]
BLOCKS = [
    "affine",
    "transformer block",
    "norms",
    "tied around another",
    "product of parameters",
    "scaled weight",
    "weight on the left",
    "weight made from the input",
    "frozen",
    "somebody else's function",
    "two parameters at one node",
    "ours and torch's share a weight",
    "recomputed",
    "recomputed within what is recomputed",
    "rerun, and recomputed within",
    "block that is rerun",
    "saved elsewhere",
    "activations changed in place",
    "complex numbers",
    "halves of a weight",
    "one weight for each expert",
    "one transpose in two places",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_leaf_has_its_gradient(name: str, schedule: str, one_rank: Any) -> None:
    """With any schedule, stage and loss parameters, a parameter added late, and plain tensors get gradients."""
    folded, objective = Folded(schedule), Distance()
    modules = [Block(name, ours=number % 2 == 1) for number in range(folded.stages)]
    executor = executor_of(modules, folded, objective, one_rank)
    modules[0].late = nn.Parameter(torch.randn(WIDTH))
    leaves = [parameter for module in (*modules, objective) for parameter in module.parameters()]
    for microbatches in (2, 3):
        same_as_one_pass(executor, batches(microbatches), [*leaves, *objective.center])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_complex_activations_have_gradients(schedule: str, one_rank: Any) -> None:
    """Stages may pass complex tensors."""
    folded, objective = Folded(schedule), Distance()
    modules = [Fourier(number, folded.stages) for number in range(folded.stages)]
    executor = executor_of(modules, folded, objective, one_rank)
    same_as_one_pass(executor, batches(3), [parameter for module in modules for parameter in module.parameters()])


def state_of_losses(*losses: tuple[float, dict[str, Tensor]]) -> StepState:
    """Return a state in which microbatches have losses, with weight 1 and these sums, written from last to first."""
    state = StepState(microbatches=len(losses), specs=STEP_SPECS)
    for index, (loss, sums) in reversed([*enumerate(losses)]):
        state.microbatch(index)["losses"] = {"loss": torch.tensor(loss), "weight": torch.tensor(1.0), "sums": sums}
    return state


def test_losses_are_in_the_order_of_microbatches() -> None:
    """A program may run microbatch 1 before 0; sums are float64, exact where float32 would round."""
    one = torch.tensor(1.0)
    state = state_of_losses((2.0**24, {"hits": 2 * one}), (1.0, {"hits": one}))
    assert state["losses"]["loss"].tolist() == [2.0**24, 1.0] and sum_losses_and_weights(state).tolist() == [
        2.0**24 + 1,
        2.0,
    ]
    assert state["losses"]["sums"]["hits"].tolist() == [2.0, 1.0]


def test_named_sums_that_differ_between_microbatches_are_named() -> None:
    """The message names the microbatch and its differing sum."""
    state = state_of_losses((1.0, {}), (1.0, {"hits": torch.tensor(1.0)}))
    message = r"\['losses'\]: at \['sums'\]: microbatch 1 and the first one do not both have \['hits'\]"
    with pytest.raises(ValueError, match=message):
        state["losses"]
