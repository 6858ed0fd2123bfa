"""
Executor overhead per action, without the stage's matrix products, autograd's engine, the loss and communication.

One process plays rank 3 among 8 ranks whose messages complete at once. Its stage is a residual linear layer with inputs
(16, 32). Times are CPU time of its thread. torch.distributed.pipelining runs over torch's fake process group.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.model import BatchContext, LayerRange, TokenContext
from drawloom.components.ports.pipeline import create_step_state
from drawloom.components.ports.program import iterate_actions
from drawloom.components.ports.stages import Stage
from drawloom.graph.registry.registry import Registry
from drawloom.kernels.deferred_grads import MatrixProduct
from drawloom.kernels.linear import linear_eager

RANKS, RANK, MICROBATCHES, ROUNDS = 8, 3, 32, 15


class Clock:
    """Sum of the time spent outside the executor."""

    def __init__(self) -> None:
        self.outside = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts as outside."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = self.outside, time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.outside = before + time.thread_time_ns() - began  # nested timed calls are included once

        return timed

    def measure(self, step: Callable[[], Any], actions: int) -> tuple[float, float]:
        """Return the least and the median microseconds per action over several steps."""
        durations = []
        for _ in range(ROUNDS):
            self.outside = 0
            began = time.thread_time_ns()
            step()
            durations.append((time.thread_time_ns() - began - self.outside) / actions / 1e3)
        return min(durations), statistics.median(durations)


class Residual(nn.Module):
    """A small stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, inputs: Tensor, shared: Any = None) -> Tensor:
        output: Tensor = inputs + self.linear(inputs)
        return output


class OurResidual(Residual):
    """A residual stage with our linear operation, which can defer its weight gradient."""

    def forward(self, inputs: Tensor, shared: Any = None, finish: Any = None) -> Any:
        hidden = inputs + linear_eager(inputs, self.linear.weight)
        return hidden if finish is None else finish(hidden, None)


class AtOnce:
    """Link whose messages complete at once, and the message itself."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...

    def send(self, tensor: Tensor) -> "AtOnce":
        return self

    def receive(self, tensor: Tensor) -> "AtOnce":
        return self


@attrs.define
class World:
    """All dependencies of the executor on one rank."""

    local: list[Stage]
    owners: tuple[int, ...]
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    shares_gpu: bool = False
    between: Tensor = attrs.field(factory=lambda: torch.empty(16, 32, device="meta"))

    def make_current(self) -> None:
        pass

    def get_peak_memory_so_far(self) -> int:
        return 0

    sizes = PerDimension(pipeline=RANKS)
    indices = PerDimension(pipeline=RANK)
    context_group = pipeline_group = SimpleNamespace(size=1)
    weight_copies = ()

    def open_channels(self, edges: Any) -> dict[int, AtOnce]:
        return {peer: AtOnce() for peer in range(RANKS)}

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Tensor:
        return self.between

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, BatchContext]:
        return batch.tokens, TokenContext(batch.positions, batch.document_ids)

    def loss(self, hidden: Tensor, head: Any, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return hidden.square().sum(), torch.ones(()), {}


def measure_drawloom(name: str) -> tuple[int, float, float]:
    """Return the action count of our executor's step, and its least and median microseconds per action."""
    schedule = Registry.from_package("drawloom.components").require(f"pipeline.schedules.{name}").cls()
    owners = schedule.stage_to_rank(RANKS)
    clock = Clock()
    stages = [index for index, owner in enumerate(owners) if owner == RANK]
    local = []
    for index in stages:
        module = OurResidual()
        module.forward = clock.around(module.forward)  # type: ignore[method-assign]
        local.append(
            Stage(index, len(owners), LayerRange(index, index + 1, index == 0, index == len(owners) - 1), module)
        )
    world: Any = World(local, owners)
    executor = ProgramExecutor(stages=world, schedule=schedule, objective=world, mesh=world, device=world)
    executor.open()
    row = torch.zeros(16, 32)
    batches = [TokenBatch(row, row, row, row, row.float())] * MICROBATCHES
    actions = len([*iterate_actions(lower_to_rank_program(schedule.program(RANKS, MICROBATCHES), RANK))])
    executor.run_forward_and_backward(create_step_state(batches))
    with _autograd_timed(clock):
        return actions, *clock.measure(lambda: executor.run_forward_and_backward(create_step_state(batches)), actions)


class _autograd_timed:
    """Context in which autograd's passes and deferred weight gradients count as outside."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.before = torch.autograd.backward, torch.autograd.grad, MatrixProduct.__call__
        torch.autograd.backward = self.clock.around(self.before[0])
        torch.autograd.grad = self.clock.around(self.before[1])
        # The weight pass multiplies without autograd.
        MatrixProduct.__call__ = self.clock.around(self.before[2])  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        torch.autograd.backward, torch.autograd.grad, MatrixProduct.__call__ = self.before  # type: ignore[method-assign]


def measure_torch(name: str) -> tuple[int, float, float]:
    """Return the same figures for torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
    from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    clock = Clock()
    try:
        module = Residual()
        module.forward = clock.around(module.forward)  # type: ignore[method-assign]
        rows = torch.zeros(16, 32, requires_grad=True)
        stage = PipelineStage(module, RANK, RANKS, torch.device("cpu"), rows, rows, rows, rows)
        loss = clock.around(lambda output, target: output.square().sum())
        schedule: Any
        if name == "one_f_one_b":
            schedule, actions = Schedule1F1B(stage, MICROBATCHES, loss), 6 * MICROBATCHES
        else:
            schedule, actions = ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss), 7 * MICROBATCHES
        stage._inference_mode = InferenceMode.STATIC  # the ranks would agree on this
        schedule._warmup_p2p = lambda *_: None
        before = dist.batch_isend_irecv
        schedule.step()
        dist.batch_isend_irecv = clock.around(before)
        try:
            with _autograd_timed(clock):
                return actions, *clock.measure(schedule.step, actions)
        finally:
            dist.batch_isend_irecv = before
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print a row per schedule and executor."""
    torch.set_num_threads(1)
    print(f"{'schedule':16} {'executor':8} {'actions':>8} {'us/action: least':>17} {'median':>7}")
    for name in ("one_f_one_b", "zero_bubble_1p"):
        for who, measure in (("drawloom", measure_drawloom), ("torch", measure_torch)):
            try:
                actions, least, median = measure(name)
            except LookupError as error:
                print(f"{name:16} {who:8} not there: {error}")
                continue
            print(f"{name:16} {who:8} {actions:>8} {least:>17.1f} {median:>7.1f}")
