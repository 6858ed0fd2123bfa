"""
The passes of a stage as CUDA graphs: each is launched at once, in place of a thousand kernels one after another.

A graph reads and writes the addresses that it was recorded with. Each place for a microbatch in flight, a slot, has
tensors, graphs and a memory pool of its own, which no other slot uses: what the forward graph leaves there is there
until the backward graph of the same slot reads it, in whatever order slots take turns. What comes in is copied to the
slot's tensors, and what goes out is copied from them; weight gradients are added to sums that persist. The first step
runs kernel by kernel, so that everything that compiles, or chooses among kernels, has done so; all graphs are recorded
before the second.

Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs" (PyTorch blog), with slots in the place of one callable.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.runtime.cuda_graphs import CudaRecord, Record, Recorded
from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs
from drawloom.components.pipeline.runtime.stage_runner import StageRunner, as_input, detach, floating
from drawloom.components.ports.model import BatchContext, Finish
from drawloom.components.ports.pipeline import LOSSES, Loss
from drawloom.components.ports.program import Action
from drawloom.components.ports.stages import Stage
from drawloom.components.state.batch import Batch
from drawloom.components.state.step_state import StepState
from drawloom.components.state.trees import leaves, transform
from drawloom.graph import UserError

log = logging.getLogger("drawloom.pipeline")


@attrs.define(eq=False)
class Slot:
    """The graphs of a stage's passes for one microbatch at a time; `runner` records them as those of microbatch 0."""

    runner: StageRunner
    record: Record
    _given: Any = None
    _grads: list[Tensor] | None = None
    _passes: dict[str, Recorded] = attrs.field(factory=dict)

    def open(self, given: Any) -> None:
        """Record all passes, from tensors of the shapes of those in `given`: inputs, context and batch."""
        self._given = transform(_copy, given)
        self._passes["forward"] = self.record(self._forward)
        if not self.runner.last:
            output, _ = self._passes["forward"].outputs
            self._grads = [torch.zeros_like(leaf) for leaf in floating(output)]
        for name in ("backward_input", "backward_weight") if self.runner.split else ("backward",):
            self._passes[name] = self.record(partial(self._backward, name))

    def forward(self, given: Any) -> tuple[Any, Any]:
        """Return copies of the stage's output and, on the last stage, of the losses; None on others."""
        _put(self._given, given)
        output, losses = self._replay("forward")
        return output, losses

    def backward(self, grads: list[Tensor] | None) -> list[Tensor]:
        """The gradients of the inputs from those of the outputs, and those of weights."""
        if not self.runner.split:
            return self._backward_by("backward", grads)
        # A stage whose backward pass is split for some microbatches has no third graph for the others.
        found = self.backward_input(grads)
        self.backward_weight()
        return found

    def backward_input(self, grads: list[Tensor] | None) -> list[Tensor]:
        """The gradients of the inputs from those of the outputs."""
        return self._backward_by("backward_input", grads)

    def _backward_by(self, name: str, grads: list[Tensor] | None) -> list[Tensor]:
        if grads is not None:
            _put(self._grads, grads)
        found: list[Tensor] = self._replay(name)
        return found

    def backward_weight(self) -> None:
        """Add the weight gradients that `backward_input` has put off."""
        self._replay("backward_weight")

    def _forward(self) -> Any:
        inputs, shared, batch = self._given
        # The start of the stage's graph, but for token ids.
        output = self.runner.forward(0, as_input(transform(detach, inputs)), shared, batch)
        return output, self.runner.state.microbatch(0).get(LOSSES)

    def _backward(self, name: str) -> Any:
        method = getattr(self.runner, name)
        return method(0) if name == "backward_weight" else method(0, self._grads)

    def _replay(self, name: str) -> Any:
        recorded = self._passes[name]
        recorded.replay()
        return transform(_copy, recorded.outputs)


@attrs.define(eq=False)
class WeightSums:
    """The gradients of parameters, whose addresses graphs know: the same tensors in every step."""

    _sums: dict[nn.Parameter, Tensor] = attrs.field(factory=dict)
    _left: dict[Tensor, Tensor | None] = attrs.field(factory=dict)  # by sum, the gradient whose place it took

    def learn(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep sums for parameters that have gradients now; others, which nothing reaches, never get any."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._sums:
                self._sums[parameter] = parameter.grad.contiguous()  # kernels add to nothing else

    def attach(self) -> None:
        """Make the sums the gradients of their parameters."""
        for parameter, summed in self._sums.items():
            if parameter.grad is not summed:
                self._left[summed] = parameter.grad
                parameter.grad = summed

    def reset(self) -> None:
        """Set those that have become gradients since the last time to what the gradients were, or to zero."""
        if self._left:  # torch refuses an empty list
            torch._foreach_zero_(list(self._left))
        for summed, grad in self._left.items():
            if grad is not None:
                summed.copy_(grad)
        self._left = {}


@attrs.define(eq=False)
class StageGraphs:
    """
    The slots of one stage, for microbatches of one shape, from one step to the next.

    Microbatches of other shapes run kernel by kernel, which is logged once.
    """

    stage: Stage
    objective: Loss
    new_record: Callable[[], Record]
    _first: Any = None  # the microbatch that others are compared with, and whether its backward pass is split
    _slots: list[Slot] = attrs.field(factory=list)
    _free: list[Slot] = attrs.field(factory=list)
    _warned: bool = False

    def lacks(self, in_flight: int) -> bool:
        """Whether there are fewer slots than microbatches in flight, and it is known how to make more."""
        return self._first is not None and len(self._slots) < in_flight

    def begin(self, in_flight: int) -> None:
        """Before the first microbatch of a step: no slot is in use, and there are enough, once a step was taken."""
        while self.lacks(in_flight):
            given, split = self._first
            self._slots.append(Slot(self._runner(split), self.new_record()))
            self._slots[-1].open(given)
        self._free = list(self._slots)

    def take(self, given: Any, stage: Stage, split: bool) -> Slot | None:
        """A slot for a microbatch of the stage as it recomputes in this step; None if it is to run kernel by kernel."""
        if self._first is None:
            self._first, self.stage = (transform(_copy, given), split), stage
        if _shape((given, split)) != _shape(self._first):
            self._warn()
            return None
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        """The microbatch of a slot is done."""
        self._free.append(slot)

    def _runner(self, split: bool) -> StageRunner:
        return StageRunner(self.stage, self.objective, split=split)

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                f"capture: stage {self.stage.index} gets microbatches of several shapes, and only those of the first "
                "are launched as CUDA graphs"
            )
        self._warned = True


@attrs.define(eq=False)
class CapturedRunner(StageRunner):
    """A `StageRunner` that launches graphs where there are any for a microbatch."""

    graphs: StageGraphs = attrs.field(kw_only=True)
    _taken: dict[int, Slot] = attrs.field(init=False, factory=dict)

    def forward(
        self, microbatch: int, inputs: Any, shared: BatchContext, batch: Batch | None, finish: Finish | None = None
    ) -> Any:
        """As that of `StageRunner`."""
        # Graphs serve batches of other counts, such as those of padding, which only the host reads.
        given = inputs, shared, None if batch is None else batch.without_host_values()
        slot = self.graphs.take(given, self.stage, self.split) if torch.is_grad_enabled() and finish is None else None
        if slot is None:
            return super().forward(microbatch, inputs, shared, batch, finish)
        self._taken[microbatch] = slot
        output, losses = slot.forward(given)
        if losses is not None:
            self.state.microbatch(microbatch)[LOSSES] = losses
        return output

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """As that of `StageRunner`."""
        if (slot := self._taken.pop(microbatch, None)) is None:
            return super().backward(microbatch, grads)
        found = slot.backward(grads)
        self.graphs.give_back(slot)
        return found

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """As that of `StageRunner`."""
        if (slot := self._taken.get(microbatch)) is None:
            return super().backward_input(microbatch, grads)
        return slot.backward_input(grads)

    def backward_weight(self, microbatch: int) -> None:
        """As that of `StageRunner`."""
        if (slot := self._taken.pop(microbatch, None)) is None:
            return super().backward_weight(microbatch)
        slot.backward_weight()
        self.graphs.give_back(slot)


@attrs.define(eq=False)
class Captures:
    """The graphs of all stages of this rank."""

    objective: Loss
    new_record: Callable[[], Record]
    _graphs: dict[int, StageGraphs] = attrs.field(factory=dict)
    _sums: WeightSums = attrs.field(factory=WeightSums)
    _whole_rows: bool = True

    @classmethod
    def on(cls, device: torch.device, objective: Loss) -> "Captures | None":
        """Those of a GPU; None on a CPU, whose kernels take longer than their launches."""
        if device.type == "cpu":
            return None
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return cls(objective, lambda: CudaRecord(stream))

    def runner(self, stage: Stage, state: StepState, split: bool) -> CapturedRunner:
        """Return the runner of a stage for one step."""
        graphs = self._graphs.setdefault(stage.index, StageGraphs(stage, self.objective, self.new_record))
        return CapturedRunner(stage, self.objective, state, split, graphs=graphs)

    def alike(self, inputs: list[MicrobatchInputs]) -> list[MicrobatchInputs]:
        """
        The microbatches of a step as the graphs take them: as whole rows as long as there were no others.

        Rows of several documents are the general case, for which graphs are made anew once, and which serve all later
        microbatches: those of packed data have now and then only whole rows.
        """
        if self._whole_rows and not all(each.shared.whole_rows for each in inputs):
            self._whole_rows = False
            self._graphs.clear()
        return inputs if self._whole_rows else [each.as_any_rows() for each in inputs]

    def begin(self, actions: Iterable[Action]) -> None:
        """
        Before the first microbatch of a step: record what is missing. UserError for what can't be recorded.

        No messages are under way then. To make a graph may wait for all that the GPU does, also for a message of a rank
        that waits for one of this rank.
        """
        most = most_in_flight(actions)
        if any(graphs.lacks(most[index]) for index, graphs in self._graphs.items()):
            torch.cuda.empty_cache()  # what steps have freed is of no use for the pools of slots
        self._sums.attach()
        for index, graphs in self._graphs.items():
            try:
                graphs.begin(most[index])
            except RuntimeError as error:
                raise UserError(_refusal(index, error), exit_code=2) from error
        self._sums.reset()

    def end(self) -> None:
        """After the last microbatch of a step, before its gradients are handed over."""
        for graphs in self._graphs.values():
            self._sums.learn(graphs.stage.module.parameters())


def most_in_flight(actions: Iterable[Action]) -> Counter[int]:
    """By stage, the most microbatches that have run forward and not backward, their weight gradients included."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        now[action.stage] += (action.op == "F") - (action.op in ("B", "W"))
        most[action.stage] = max(most[action.stage], now[action.stage])
    return most


def _refusal(stage: int, error: RuntimeError) -> str:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return (
        f"stages.capture: stage {stage} does something that a CUDA graph can't hold: {first.rstrip('.')}; "
        "write capture = false"
    )


def _put(place: Any, values: Any) -> None:
    """Copy the tensors of a tree to those of another one of the same shape."""
    pairs = zip(leaves(place), leaves(values), strict=True)
    tensors: Sequence[tuple[Tensor, Tensor]] = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    with torch.no_grad():
        torch._foreach_copy_([there for there, _ in tensors], [here for _, here in tensors])


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _shape(tree: Any) -> list[Any]:
    """What graphs depend on: shapes and dtypes, and of what is no tensor, the value itself."""
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves(tree)]
