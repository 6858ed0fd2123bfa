"""
The passes of a stage as CUDA graphs: each is launched at once, in place of a thousand kernels one after another.

A graph reads and writes the addresses that it was recorded with. Each place for a microbatch in flight, a slot, has
tensors, graphs and a memory pool of its own, which no other slot uses: what the forward graph leaves there is there
until the backward graph of the same slot reads it, in whatever order slots take turns. What comes in is copied to the
slot's tensors, and what goes out is copied from them; weight gradients are added to sums that persist. The first step
runs kernel by kernel, so that everything that compiles, or chooses among kernels, has done so.

Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs" (PyTorch blog), with slots in the place of one callable.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.runtime.stage_runner import StageRunner, as_input, detach
from drawloom.components.pipeline.state.handler import PipelineStateHandler
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import BatchContext, Finish, Stage
from drawloom.components.ports.pipeline import Loss
from drawloom.components.storage.pytree import leaves, transform
from drawloom.graph import UserError

log = logging.getLogger("drawloom.pipeline")

STATE = ("loss", "weight", "sums")
"""What the last stage writes of a microbatch."""


class Recorded(Protocol):
    """A recorded function."""

    @property
    def outputs(self) -> Any:
        """What the function gives, at the same addresses after each replay."""
        ...

    def replay(self) -> None:
        """Compute the outputs anew, from what is in the inputs now."""
        ...


Record = Callable[[Callable[[], Any]], Recorded]
"""Records a function without running its kernels; what is recorded by one `Record` shares memory, and takes turns."""


@attrs.frozen
class CudaGraph:
    """A recorded CUDA graph."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> None:
        """Launch it in the current stream."""
        self.graph.replay()


@attrs.define
class CudaRecord:
    """Records in a stream of its own, with a memory pool of its own."""

    stream: torch.cuda.Stream
    _pool: Any = attrs.field(init=False, factory=torch.cuda.graph_pool_handle)

    def __call__(self, run: Callable[[], Any]) -> CudaGraph:
        """The graph of what a function launches."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # Not `torch.cuda.graph`, which waits for the device: that may be receiving what another rank sends only when it
        # has got something from this one.
        with torch.cuda.stream(self.stream):
            # Other threads, such as those that write checkpoints, may do meanwhile what this one must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return CudaGraph(graph, outputs)


@attrs.define(eq=False)
class Slot:
    """The graphs of a stage's passes for one microbatch at a time; `runner` records them as those of microbatch 0."""

    runner: StageRunner
    record: Record
    _given: Any = None
    _grads: list[Tensor] | None = None
    _passes: dict[str, Recorded] = attrs.field(factory=dict)

    def forward(self, inputs: Any, shared: BatchContext, batch: Batch | None) -> tuple[Any, list[Any]]:
        """The stage's output, and of the last stage loss, weight and sums: copies, as the slot keeps its tensors."""
        self._given = _put(self._given, (inputs, shared, batch))
        return self._run("forward", self._forward)  # type: ignore[no-any-return]

    def backward(self, name: str, grads: list[Tensor] | None) -> list[Tensor]:
        """The gradients of the inputs, by the runner's method of this name, from those of the outputs."""
        if grads is not None:
            self._grads = _put(self._grads, grads)
        method = getattr(self.runner, name)
        return self._run(name, lambda: method(0, self._grads))  # type: ignore[no-any-return]

    def backward_weight(self) -> None:
        """Add the weight gradients that `backward_input` has put off."""
        self._run("backward_weight", lambda: self.runner.backward_weight(0))

    def _forward(self) -> Any:
        inputs, shared, batch = self._given
        output = self.runner.forward(0, as_input(transform(detach, inputs)), shared, batch)
        view = self.runner.state.sharded_state(0)
        return output, [view[name] for name in STATE if name in view]

    def _run(self, name: str, passed: Callable[[], Any]) -> Any:
        if name not in self._passes:
            self._passes[name] = self.record(passed)
        recorded = self._passes[name]
        recorded.replay()
        return transform(_copy, recorded.outputs)


@attrs.define(eq=False)
class WeightSums:
    """The gradients of parameters, whose addresses graphs know: the same tensors in every step."""

    _sums: dict[nn.Parameter, Tensor] = attrs.field(factory=dict)

    def learn(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep sums for parameters that have gradients now; others, which nothing reaches, never get any."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._sums:
                self._sums[parameter] = parameter.grad.contiguous()  # kernels add to nothing else

    def begin(self) -> None:
        """Before the first microbatch of a step: the sums are the gradients, and what these were."""
        fresh = [(parameter, summed) for parameter, summed in self._sums.items() if parameter.grad is not summed]
        if fresh:  # torch refuses an empty list
            torch._foreach_zero_([summed for _, summed in fresh])
        for parameter, summed in fresh:
            if parameter.grad is not None:
                summed.copy_(parameter.grad)
            parameter.grad = summed


@attrs.define(eq=False)
class StageGraphs:
    """
    The slots of one stage, for microbatches of one shape, from one step to the next.

    Microbatches of other shapes run kernel by kernel, which is logged once.
    """

    stage: Stage
    objective: Loss
    new_record: Callable[[], Record]
    _shape: Any = None
    _ready: bool = False
    _slots: list[Slot] = attrs.field(factory=list)
    _free: list[Slot] = attrs.field(factory=list)
    _warned: bool = False

    def begin(self) -> bool:
        """Before the first microbatch of a step, no slot is in use; whether slots will be made in this step."""
        self._free = list(self._slots)
        return self._ready and not self._slots

    def end(self) -> None:
        """After the last microbatch of a step: what has run kernel by kernel once can be recorded."""
        self._ready = self._shape is not None

    def take(self, given: Any, split: bool) -> Slot | None:
        """A slot for a microbatch; None if it is to run kernel by kernel."""
        shape = [split, *map(_shape, leaves(given))]
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            self._warn(shape)
        elif self._ready:
            return self._free.pop() if self._free else self._new(split)
        return None

    def give_back(self, slot: Slot) -> None:
        """The microbatch of a slot is done."""
        self._free.append(slot)

    def _new(self, split: bool) -> Slot:
        runner = StageRunner(self.stage, self.objective, PipelineStateHandler(None, 1), split=split)
        self._slots.append(Slot(runner, self.new_record()))
        return self._slots[-1]

    def _warn(self, shape: Any) -> None:
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
        given = inputs, shared, batch
        slot = self.graphs.take(given, self.split) if torch.is_grad_enabled() and finish is None else None
        if slot is None:
            return super().forward(microbatch, inputs, shared, batch, finish)
        self._taken[microbatch] = slot
        output, kept = self._recorded(lambda: slot.forward(*given))
        if kept:
            self._keep(microbatch, *kept)
        return output

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """As that of `StageRunner`."""
        if (slot := self._taken.pop(microbatch, None)) is None:
            return super().backward(microbatch, grads)
        found: list[Tensor] = self._recorded(lambda: slot.backward("backward", grads))
        self.graphs.give_back(slot)
        return found

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """As that of `StageRunner`."""
        if (slot := self._taken.get(microbatch)) is None:
            return super().backward_input(microbatch, grads)
        found: list[Tensor] = self._recorded(lambda: slot.backward("backward_input", grads))
        return found

    def backward_weight(self, microbatch: int) -> None:
        """As that of `StageRunner`."""
        if (slot := self._taken.pop(microbatch, None)) is None:
            return super().backward_weight(microbatch)
        self._recorded(slot.backward_weight)
        self.graphs.give_back(slot)

    def _recorded(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"stages.capture: stage {self.stage.index} does something that a CUDA graph can't hold: {first}; "
                "write capture = false",
                exit_code=2,
            ) from error


@attrs.define(eq=False)
class Captures:
    """The graphs of all stages of this rank."""

    objective: Loss
    new_record: Callable[[], Record]
    _graphs: dict[int, StageGraphs] = attrs.field(factory=dict)
    _sums: WeightSums = attrs.field(factory=WeightSums)

    @classmethod
    def on(cls, device: torch.device, objective: Loss) -> "Captures | None":
        """Those of a GPU; None on a CPU, whose kernels take longer than their launches."""
        if device.type == "cpu":
            return None
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return cls(objective, lambda: CudaRecord(stream))

    def runner(self, stage: Stage, state: PipelineStateHandler, split: bool) -> CapturedRunner:
        """What runs a stage in a step."""
        graphs = self._graphs.setdefault(stage.index, StageGraphs(stage, self.objective, self.new_record))
        return CapturedRunner(stage, self.objective, state, split, graphs=graphs)

    def begin(self) -> None:
        """Before the first microbatch of a step."""
        self._sums.begin()
        will_record = [graphs.begin() for graphs in self._graphs.values()]
        if any(will_record):
            # What the first step has freed is not in the pools of slots. To give it back while messages are under way
            # would wait for these.
            torch.cuda.empty_cache()

    def end(self) -> None:
        """After the last microbatch of a step, before its gradients are handed over."""
        for graphs in self._graphs.values():
            self._sums.learn(graphs.stage.module.parameters())
            graphs.end()


def _put(place: Any, values: Any) -> Any:
    """A tree of tensors with these values: `place` itself, or a new one if it is None."""
    if place is None:
        return transform(_copy, values)
    pairs = zip(leaves(place), leaves(values), strict=True)
    tensors: Sequence[tuple[Tensor, Tensor]] = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    with torch.no_grad():
        torch._foreach_copy_([there for there, _ in tensors], [here for _, here in tensors])
    return place


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _shape(leaf: Any) -> Any:
    """What graphs depend on; of what is no tensor, the value itself."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
