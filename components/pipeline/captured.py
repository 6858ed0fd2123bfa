"""
CUDA graphs for the passes of a rank's stages: a pass is one launch, instead of a thousand kernels one after another.

A graph reads and writes the recorded addresses. Every microbatch in flight has a slot with its own tensors, graphs and
memory pool: tensors left in the pool by a slot's forward graph stay until the slot's backward graph reads them, in any
slot order. Inputs are copied into the slot's tensors, and outputs are copied from them; weight gradients are added to
persistent sums. The first step runs kernel by kernel, so compilation and kernel selection have ended; all graphs are
recorded before the second step.

Data-parallel ranks gather parameters and reduce gradients inside of the graphs. So a slot has other graphs for the
first microbatch, whose passes gather, and for the last, whose backward pass reduces.

Text generation with a key-value cache has a graph for each cache: a pass over one new token per row. The first pass
for a size of caches runs kernel by kernel, too.

Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs" (PyTorch blog), with slots instead of one callable.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary, proxy

import attrs
import torch
from torch import Tensor, nn

from drawloom import Every, NodeView, Problem, UserError, component, internal
from drawloom.components.pipeline.runtime.stage_runner import (
    StageRunner,
    detach_leaf,
    list_floating_leaves,
    require_grad_in_place,
)
from drawloom.components.state.trees import list_leaves, map_leaves
from drawloom.ports import (
    LOSSES,
    Action,
    Batch,
    BatchContext,
    Device,
    Finish,
    Head,
    KeyValueCache,
    Loss,
    Microbatches,
    MicrobatchInputs,
    Operation,
    PassFeature,
    PassRun,
    RecordableFinish,
    RowLimit,
    RunnableStage,
    Stage,
    StageFeature,
    StageNodes,
    WrappingOrder,
)


class Recorded(Protocol):
    """Function whose kernels are recorded, to be launched again by `replay`."""

    @property
    def outputs(self) -> Any:
        """Return the function's outputs, whose addresses are the same in every replay."""

    def replay(self) -> None:
        """Compute the outputs from the inputs' current values."""


Record = Callable[[Callable[[], Any]], Recorded]
"""Record a function without running its kernels; recordings of one `Record` share memory, and must take turns."""


@attrs.frozen
class CudaGraph:
    """Recorded CUDA graph."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self.graph.replay()


@attrs.define
class CudaRecord:
    """CUDA graph recorder with its own stream and memory pool."""

    stream: torch.cuda.Stream
    _pool: Any = internal(factory=torch.cuda.graph_pool_handle)

    def __call__(self, run: Callable[[], Any]) -> CudaGraph:
        """Record a function's kernels as a graph."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # `torch.cuda.graph` would wait for the device, which may be receiving a message that another rank only sends
        # after a message of this rank.
        with torch.cuda.stream(self.stream):
            # Other threads, such as checkpoint writers, may meanwhile call what this thread must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):  # which says only that there was an error
                    graph.capture_end()
                graph.reset()  # a communicator would not end while the traceback refers to it
                raise
            graph.capture_end()
        return CudaGraph(graph, outputs)


log = logging.getLogger("drawloom.pipeline")


class StageResult(NamedTuple):
    """A stage's output and, on the last stage, the losses; None on others."""

    output: Any
    losses: Any


PASS_NAMES = {"F": ["forward"], "B": ["backward"], "I": ["backward_input"], "W": ["backward_weight"]}
"""Runner's methods by operation."""


@attrs.frozen
class GraphKey:
    """
    The slot of a microbatch in a program, by number, and the collectives in its graphs.

    `gathers` says whether it is the first of a stage on data-parallel ranks, and `reduces` whether it is the last.
    """

    slot: int
    gathers: bool
    reduces: bool


@attrs.frozen
class StagePlan:
    """A stage's part of a program: the keys by microbatch, and its passes in order, by operation and key."""

    keys: dict[int, GraphKey] = attrs.field(factory=dict)
    passes: list[tuple[str, GraphKey]] = attrs.field(factory=list)


def assign_slots(actions: Iterable[Action]) -> dict[int, StagePlan]:
    """Return the stages' plans; a slot is taken until the microbatch's weight gradients exist."""
    reduced = {action.stage: action.microbatch for action in actions if action.op == "REDUCE_GRAD"}
    plans: dict[int, StagePlan] = {}
    free: dict[int, list[int]] = {}
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        keys = plans.setdefault(stage, StagePlan()).keys
        if action.op == "F":
            slots = free.setdefault(stage, [])
            slot = slots.pop() if slots else 1 + max((key.slot for key in keys.values()), default=-1)
            keys[microbatch] = GraphKey(slot, stage in reduced and not keys, reduced.get(stage) == microbatch)
        elif action.op in ("B", "W"):
            free[stage].append(keys[microbatch].slot)
        if action.op in PASS_NAMES:
            plans[stage].passes.append((action.op, keys[microbatch]))
    return plans


@attrs.define(eq=False)
class MicrobatchGraphs:
    """
    CUDA graphs for a stage's passes on one microbatch at a time; `runner` records them with microbatch number 0.

    `holders` are the parameters whose `.grad` a pass may set, besides adding to it.
    """

    runner: StageRunner
    record: Record
    reduces: bool
    holders: Sequence[nn.Parameter]
    _given: Any
    _grads: list[Tensor] | None = None
    _passes: dict[str, Recorded] = attrs.field(factory=dict)
    _changed: dict[str, list[nn.Parameter]] = attrs.field(factory=dict)

    def record_pass(self, operation: str) -> None:
        """Record an operation's passes, for tensors shaped like the given ones: inputs, context and batch."""
        # A stage that splits the backward passes of some microbatches has no third graph for the others.
        names = (
            ["backward_input", "backward_weight"] if self.runner.split and operation == "B" else PASS_NAMES[operation]
        )
        for name in names:
            if name not in self._passes:
                run = self._run_forward if name == "forward" else partial(self._run_backward, name)
                self._passes[name] = self.record(run)
        if operation == "F" and not self.runner.last and self._grads is None:
            output, _ = self._passes["forward"].outputs
            self._grads = [torch.zeros_like(leaf) for leaf in list_floating_leaves(output)]

    def forward(self, inputs_context_batch: Any) -> StageResult:
        """Return copies of a forward pass's results."""
        _copy_tree_into(self._given, inputs_context_batch)
        self._passes["forward"].replay()
        return StageResult._make(map_leaves(_copy_leaf, self._passes["forward"].outputs))

    def backward(self, grads: list[Tensor] | None) -> list[Tensor]:
        """Compute all gradients from the outputs' gradients, and return the inputs' gradients."""
        if not self.runner.split:
            return self._replay_backward("backward", grads)
        input_grads = self.backward_input(grads)
        self.backward_weight()
        return input_grads

    def backward_input(self, grads: list[Tensor] | None) -> list[Tensor]:
        """Return the input gradients, given the output gradients."""
        return self._replay_backward("backward_input", grads)

    def _replay_backward(self, name: str, grads: list[Tensor] | None) -> list[Tensor]:
        """
        Launch a backward graph by name, and return the input gradients.

        `grads` are the outputs' gradients, with any shapes; None for losses, and for weight gradients.
        """
        if grads is not None:
            _copy_tree_into(self._grads, grads)
        recorded = self._passes[name]
        recorded.replay()
        input_grads, set_grads = recorded.outputs
        for parameter, grad in zip(self._changed[name], set_grads, strict=True):
            parameter.grad = grad
        return [_copy_leaf(grad) for grad in input_grads]

    def backward_weight(self) -> None:
        """Accumulate the weight gradients deferred in `backward_input`."""
        self._replay_backward("backward_weight", None)

    def _run_forward(self) -> Any:
        """Run the runner's forward pass for recording, and return the output and the losses."""
        inputs, shared, batch = self._given
        # Inputs start the stage's autograd graph, except for token ids.
        output = self.runner.forward(0, require_grad_in_place(map_leaves(detach_leaf, inputs)), shared, batch)
        return output, self.runner.state.microbatch(0).get(LOSSES)

    def _run_backward(self, name: str) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run the runner's backward method called `name`; return the inputs' gradients, and the changed ones."""
        before = [parameter.grad for parameter in self.holders]
        is_last = self.reduces and name != "backward_input"
        if is_last:
            self.runner.reduce_in_next_backward(is_last_in_step=True)
        method: Any = getattr(self.runner, name)
        input_grads = method(0) if name == "backward_weight" else method(0, self._grads)
        if is_last:
            self.runner.shards.finish_reduction()
        pairs = zip(self.holders, before, strict=True)
        self._changed[name] = [parameter for parameter, grad in pairs if parameter.grad is not grad]
        set_grads = [parameter.grad for parameter in self._changed[name]]
        for parameter, grad in zip(self.holders, before, strict=True):
            parameter.grad = grad
        return input_grads or [], set_grads


@attrs.define(eq=False)
class GradientSums:
    """Parameter gradients at fixed addresses for graphs: the same tensors in every step."""

    _sums: dict[nn.Parameter, Tensor] = attrs.field(factory=dict)
    _replaced_gradients: dict[Tensor, Tensor | None] = attrs.field(factory=dict)  # by sum

    def adopt_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the parameters' current gradients, if any, as the sums to reuse in all later steps."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._sums:
                self._sums[parameter] = parameter.grad.contiguous()  # kernels only add to contiguous tensors

    def add_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add trained parameters without a gradient yet."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._sums:
                sums = torch.zeros(parameter.shape, dtype=parameter.grad_dtype, device=parameter.device)
                self._sums[parameter] = sums

    def attach_to_parameters(self) -> None:
        """
        Set the sums as their parameters' `.grad`, and remember the replaced gradients.

        Newly attached sums have old values until `restore_or_zero_sums`; graphs are recorded in between.
        """
        for parameter, summed in self._sums.items():
            if parameter.grad is not summed:
                self._replaced_gradients[summed] = parameter.grad
                parameter.grad = summed

    def restore_or_zero_sums(self) -> None:
        """Set newly attached sums to the replaced gradients, or to zero."""
        if self._replaced_gradients:  # torch refuses an empty list
            torch._foreach_zero_(list(self._replaced_gradients))
        for summed, grad in self._replaced_gradients.items():
            if grad is not None:
                summed.copy_(grad)
        self._replaced_gradients = {}


@attrs.define(eq=False)
class TokenPass:
    """
    CUDA graph for a stage's pass over one new token per row after a cache's tokens; without gradients.

    It does not refer to the cache, and is freed with it.
    """

    runner: StageRunner
    record: Record
    _given: Any = None
    _targets: Sequence[Any] = ()
    _recorded: Recorded | None = None
    _head: Head | None = None
    _layers: tuple[int, int] = (0, 0)  # the cache's next layer before and after the pass

    def run(self, cache: KeyValueCache, inputs: Tensor, shared: BatchContext, finish: Finish | None) -> Any:
        """Return the stage's output, on the last stage `finish`'s result; record the pass if it was not."""
        recordable = finish if isinstance(finish, RecordableFinish) else None
        if self._recorded is None:
            self._given = map_leaves(_copy_leaf, (inputs, attrs.evolve(shared, cache=None), recordable))
            self._targets = list_leaves(self._given)
            self._recorded = self._record_pass(cache)
        else:
            _copy_leaves_into(self._targets, list_leaves((inputs, shared, recordable)))
        self._recorded.replay()
        cache.next_layer = self._layers[1]
        output = map_leaves(_copy_leaf, self._recorded.outputs)
        if finish is None or recordable is not None or self._head is None:
            return output
        return finish(output, self._head)

    def _record_pass(self, cache: KeyValueCache) -> Recorded:
        """Record the pass with the cache's addresses; UserError if CUDA rejects it."""
        first, weak, (inputs, shared, finish) = cache.next_layer, proxy(cache), self._given

        def run_stage() -> Any:
            """Return this stage's output, the last hidden states, or the result of a recordable `finish`."""
            weak.next_layer = first
            context = attrs.evolve(shared, cache=weak)
            output = self.runner.forward(0, inputs, context, None, finish or self._keep_head)
            self._layers = first, weak.next_layer
            return output

        try:
            return self.record(run_stage)
        except RuntimeError as error:
            raise UserError(describe_capture_error(self.runner.stage.index, error), exit_code=2) from error

    def _keep_head(self, hidden: Any, head: Head) -> Any:
        """Return the hidden states (rows, 1, hidden), and keep the head for `finish`, which is not recorded."""
        self._head = head
        return hidden


@attrs.define(eq=False)
class StageGraphs:
    """
    One stage's graphs for microbatches with one shape, persistent between steps.

    Microbatches with other shapes run kernel by kernel; this is logged once.
    """

    stage: Stage
    objective: Loss
    new_record: Callable[[], Record]
    _first: Any = None  # the reference microbatch, and whether its backward pass is split
    _token_passes: WeakKeyDictionary[KeyValueCache, TokenPass] = attrs.field(factory=WeakKeyDictionary)
    _compiled_sizes: set[tuple[int, int]] = attrs.field(factory=set)  # rows and capacity of caches
    _records: list[Record] = attrs.field(factory=list)  # by slot: its graphs take turns in the same memory
    _graphs: dict[GraphKey, MicrobatchGraphs] = attrs.field(factory=dict)
    _warned: bool = False

    @cached_property
    def whole_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that ranks gather from slices before a pass; none without slices."""
        return [] if self.stage.shards is None else self.stage.shards.list_whole_parameters()

    def lacks_graphs(self, plan: StagePlan) -> bool:
        """Return whether a plan's microbatches lack graphs, and the first microbatch is known."""
        return self._first is not None and not self._graphs.keys() >= {*plan.keys.values()}

    def record_missing(self, plan: StagePlan) -> None:
        """
        Record a plan's missing graphs, in its order.

        With gathered parameters record all of them: later graphs read parameters where the first one has gathered them,
        and recordings in between could use the same memory.
        """
        if self.whole_parameters:
            self.forget_graphs()
        own = [*self.stage.module.parameters(), *self.stage.masters.values()]
        holders = list(dict.fromkeys([*own, *self.whole_parameters]))
        complete = {*self._graphs}
        for operation, key in plan.passes:
            if key in complete:
                continue
            if key not in self._graphs:
                example, split = self._first
                while len(self._records) <= key.slot:
                    self._records.append(self.new_record())
                record = self._records[key.slot]
                self._graphs[key] = MicrobatchGraphs(
                    self._create_runner(split), record, key.reduces, holders, map_leaves(_copy_leaf, example)
                )
            self._graphs[key].record_pass(operation)
        if self.stage.shards is not None:
            self.stage.shards.reshard()  # nothing was computed: what seems to be gathered has no values

    def forget_graphs(self) -> None:
        """Free the microbatches' graphs."""
        self._graphs.clear()
        self._records.clear()

    def find(self, key: GraphKey, inputs_context_batch: Any, stage: Stage, split: bool) -> MicrobatchGraphs | None:
        """Return a microbatch's graphs; None without them, or if it has other shapes than the first one."""
        if self._first is None:
            self._first, self.stage = (map_leaves(_copy_leaf, inputs_context_batch), split), stage
        if _list_properties((inputs_context_batch, split)) != _list_properties(self._first):
            self._warn_once_of_other_shapes()
            return None
        return self._graphs.get(key)

    def get_token_pass_or_prepare(self, cache: KeyValueCache, rows: int) -> TokenPass | None:
        """
        Return the graph for passes over one token; None for the first such pass of a cache of this size.

        The first pass runs kernel by kernel, because it compiles; the graph is for the passes after it.
        """
        if cache not in self._token_passes:
            self._token_passes[cache] = TokenPass(self._create_runner(split=False), self.new_record())
            if (size := (rows, cache.capacity)) not in self._compiled_sizes:
                self._compiled_sizes.add(size)
                return None
        return self._token_passes[cache]

    def _create_runner(self, split: bool) -> StageRunner:
        return StageRunner(self.stage, self.objective, split=split)

    def _warn_once_of_other_shapes(self) -> None:
        if not self._warned:
            log.warning(
                f"capture: stage {self.stage.index} gets microbatches of several shapes, and only those of the first "
                "are launched as CUDA graphs"
            )
        self._warned = True


@attrs.define(eq=False)
class CapturedRunner(StageRunner):
    """
    `StageRunner` that launches microbatches' graphs, if they have some; `keys` are by microbatch.

    `launches_all` says whether graphs serve all microbatches in the step.
    """

    graphs: StageGraphs = attrs.field(kw_only=True)
    keys: Mapping[int, GraphKey] = attrs.field(kw_only=True)
    launches_all: bool = attrs.field(kw_only=True)
    _launched: dict[int, MicrobatchGraphs] = internal(factory=dict)

    def forward(
        self, microbatch: int, inputs: Any, shared: BatchContext, batch: Batch | None, finish: Finish | None = None
    ) -> Any:
        # Ranks gather parameters anew for a pass, so a graph would not find them at their address.
        is_alone = not (self.graphs.whole_parameters or self.stage.splits)
        cache = _find_recordable_cache(inputs, shared) if is_alone else None
        if cache is not None:
            cache.begin_fixed_pass(inputs.device)
            if (token_pass := self.graphs.get_token_pass_or_prepare(cache, len(inputs))) is not None:
                return token_pass.run(cache, inputs, shared, finish)
        given = _list_graph_inputs(MicrobatchInputs(inputs, shared, batch))
        key = self.keys.get(microbatch)
        graphs = None if key is None else self.graphs.find(key, given, self.stage, self.split)
        # A graph reads what the first microbatch's graph has gathered; other passes would gather it a second time.
        if graphs is None or (self.graphs.whole_parameters and not self.launches_all):
            return super().forward(microbatch, inputs, shared, batch, finish)
        self._launched[microbatch] = graphs
        output, losses = graphs.forward(given)
        if losses is not None:
            self.state.microbatch(microbatch)[LOSSES] = losses
        return output

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        if (graphs := self._launched.pop(microbatch, None)) is not None:
            return graphs.backward(grads)
        self._announce_reduction(microbatch)
        input_grads = super().backward(microbatch, grads)
        self._finish_reduction(microbatch)
        return input_grads

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        if (graphs := self._launched.get(microbatch)) is not None:
            return graphs.backward_input(grads)
        return super().backward_input(microbatch, grads)

    def backward_weight(self, microbatch: int) -> None:
        if (graphs := self._launched.pop(microbatch, None)) is not None:
            return graphs.backward_weight()
        self._announce_reduction(microbatch)
        super().backward_weight(microbatch)
        self._finish_reduction(microbatch)

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """Do nothing: a graph contains the reduction, and `_announce_reduction` serves passes without a graph."""

    def _announce_reduction(self, microbatch: int) -> None:
        if self.keys[microbatch].reduces:
            super().reduce_in_next_backward(is_last_in_step=True)

    def _finish_reduction(self, microbatch: int) -> None:
        """Wait for sums here, as graphs do, so all ranks have collectives in the same order."""
        if self.keys[microbatch].reduces:
            self.shards.finish_reduction()


def _find_recordable_cache(inputs: Any, shared: BatchContext) -> KeyValueCache | None:
    """Return the cache of a pass over one new token per row without gradients; None with recurrent states."""
    cache = shared.cache
    if cache is None or not cache.cached_layer_count or cache.has_states or shared.hidden_states is not None:
        return None
    has_one_token = isinstance(inputs, Tensor) and inputs.shape[1] == 1
    return cache if has_one_token and not torch.is_grad_enabled() else None


def describe_capture_error(stage: int, error: RuntimeError) -> str:
    """Return a message with the reason why CUDA rejects a stage's recording, and the remedy."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    remedy = 'remove the table with use = "pipeline.captured"'
    return f"stage {stage} can't be recorded as a CUDA graph: {first.rstrip('.')}; {remedy}"


def _copy_tree_into(targets: Any, values: Any) -> None:
    """Copy a tree's tensors into a tree with the same structure."""
    _copy_leaves_into(list_leaves(targets), list_leaves(values))


def _copy_leaves_into(targets: Sequence[Any], values: Sequence[Any]) -> None:
    """Copy a tree's tensors into another tree with the same structure."""
    pairs = zip(targets, values, strict=True)
    tensors: Sequence[tuple[Tensor, Tensor]] = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    with torch.no_grad():
        torch._foreach_copy_([target for target, _ in tensors], [value for _, value in tensors])


def _copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _list_graph_inputs(microbatch: MicrobatchInputs) -> tuple[Any, ...]:
    """Return a microbatch without the host's counts: graphs serve batches with other counts."""
    batch = microbatch.batch
    return microbatch.inputs, microbatch.shared, None if batch is None else batch.without_host_values()


def _list_properties(tree: Any) -> list[Any]:
    """Return the properties a graph is recorded for: tensor shapes and dtypes, and other leaves' values."""
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in list_leaves(tree)]


@component(impact="safe")
class CapturedPasses(StageFeature, PassFeature):
    """
    CUDA graphs for all passes on a GPU: faster for small microbatches and for texts.

    From the second step on, a stage's pass is one launch. Passes over one new token per row are, too.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.LAUNCH
    excludes: ClassVar[Mapping[str, str]] = {
        "listeners.replay": "it can't observe the layers in CUDA graphs",
        "pipeline.offloaded": "passes in CUDA graphs keep their activations in place",
    }
    keeps_layer_shapes: ClassVar[bool] = True

    device: Device
    limits: Every[RowLimit] = attrs.field(factory=Every)
    _graphs: dict[int, StageGraphs] = internal(factory=dict)
    _sums: GradientSums = internal(factory=GradientSums)
    _has_one_document_per_row: bool = internal(True)
    _graph_values: list[Any] = internal(factory=list)
    _properties: list[Any] = internal(factory=list)  # the first microbatch's

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems with ranks that graphs can't serve, adapters with dropout, and offloaded activations."""
        sizes = nodes.sizes.settings()
        if sizes["expert"] > 1 and (
            nodes.freezes_weights
            or nodes.stages.settings.get("recompute") == "blocks"
            or nodes.stages.neighbour("memory") is not None
        ):
            text = "halves of the experts' shared memory take turns, which needs all exchanges in every CUDA graph"
            hint = f'write recompute = "none", without [memory] and frozen weights, or remove [{feature.name}]'
            yield feature.problem("use", text, hint)
        has_capacity = any(node.settings.get("capacity") for node in nodes.stages.neighbours("dispatcher"))
        if sizes["expert"] > 1 and not has_capacity:
            text = "passes in CUDA graphs can't wait for the number of rows that experts on other ranks get"
            hint = f'write a dispatcher with use = "experts.symmetric" and capacity = 1.5, or remove [{feature.name}]'
            yield feature.problem("use", text, hint)
        if sizes["data_shard"] * sizes["context"] > 1 and nodes.stages.settings.get("sync_each_microbatch"):
            text = "gradients are reduced in the CUDA graph of the last microbatch"
            yield nodes.stages.problem("sync_each_microbatch", text, f"write false, or remove [{feature.name}]")
        yield from nodes.check_run_ends_with_losses(
            feature, "a run can't abort a communicator that CUDA graphs refer to"
        )
        for adapter in nodes.stages.neighbours("adapters"):
            if adapter.settings.get("dropout"):
                draws = f"[{adapter.name}] draws new random numbers for dropout in each pass"
                hint = f"remove [{feature.name}], or write dropout = 0.0 in [{adapter.name}]"
                yield feature.problem("use", f"{draws}, but a CUDA graph repeats its own", hint)
        for schedule in nodes.stages.neighbours("schedule"):
            if schedule.settings.get("offload"):
                text = cls.excludes["pipeline.offloaded"]
                yield schedule.problem("offload", text, f"remove it, or [{feature.name}]")

    @cached_property
    def _new_record(self) -> Callable[[], Record] | None:
        """Factory for recorders on a GPU; None on a CPU, whose kernels take longer than their launches."""
        if self.device.device.type == "cpu":
            return None
        stream: Any = torch.cuda.Stream(self.device.device)  # type: ignore[no-untyped-call]
        return lambda: CudaRecord(stream)

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Record missing graphs before a training step, and let all stages launch their graphs."""
        if (new_record := self._new_record) is None:
            return operations
        plans: Mapping[int, StagePlan] = {}
        launches_all = False
        if run.kind == "training":
            for runnable in run.stages.values():
                if runnable.stage.shards is not None:
                    runnable.stage.shards.reshard()  # graphs gather all parameters, whatever a loss's passes have left
            run.microbatches = self._unify_one_document_flags(run)
            self._forget_outdated_graphs()
            properties = [_list_properties(_list_graph_inputs(inputs)) for inputs in run.microbatches]
            self._properties = self._properties or properties[:1]
            launches_all = all(others in self._properties for others in properties)
            plans = assign_slots(run.actions)
            self._record_missing_graphs(plans)
            # The graph of a stage's first microbatch gathers the stage.
            operations = {**operations, "UNSHARD": lambda _action: None}
        run.stages = {
            index: self._wrap(runnable, new_record, plans.get(index, StagePlan()).keys, launches_all)
            for index, runnable in run.stages.items()
        }
        return operations

    def end_run(self, run: PassRun) -> None:
        """Keep the training step's gradient tensors for later steps."""
        if self._new_record is not None and run.kind == "training":
            for graphs in self._graphs.values():
                self._sums.adopt_gradients(graphs.stage.module.parameters())

    def close(self) -> None:
        """Free the graphs."""
        self._forget_graphs()

    def _wrap(
        self,
        runnable: RunnableStage,
        new_record: Callable[[], Record],
        keys: Mapping[int, GraphKey],
        launches_all: bool,
    ) -> CapturedRunner:
        """Return a stage's runner for one step."""
        stage, objective = runnable.stage, runnable.objective
        graphs = self._graphs.setdefault(stage.index, StageGraphs(stage, objective, new_record))
        return CapturedRunner(
            stage, objective, runnable.state, runnable.split, graphs=graphs, keys=keys, launches_all=launches_all
        )

    def _forget_outdated_graphs(self) -> None:
        if (values := [limit.graph_values for limit in self.limits.values()]) != self._graph_values:
            self._graph_values = values
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Free the graphs, also of runners that live on: a communicator does not end while a graph refers to it."""
        for graphs in self._graphs.values():
            graphs.forget_graphs()
        self._graphs.clear()
        self._properties = []

    def _unify_one_document_flags(self, run: PassRun) -> Microbatches:
        """
        Return a step's microbatches with one `one_document_per_row` flag: true until a row with several documents
        occurs.

        Rows with several documents are the general case. When they first occur, graphs are recorded again, and then
        serve all later microbatches, because a microbatch of packed data sometimes has only whole rows. Ranks with
        collectives in graphs record them together, so they run a step with such a row kernel by kernel.
        """
        if self._has_one_document_per_row:
            if all(inputs.shared.one_document_per_row for inputs in run.microbatches):
                return run.microbatches
            if self._properties and any(part.stage.shards or part.stage.splits for part in run.stages.values()):
                return run.microbatches
            self._has_one_document_per_row = False
            self._forget_graphs()
        return [
            attrs.evolve(inputs, shared=attrs.evolve(inputs.shared, one_document_per_row=False))
            for inputs in run.microbatches
        ]

    def _record_missing_graphs(self, plans: Mapping[int, StagePlan]) -> None:
        """
        Record missing graphs before a step's first microbatch; UserError if a pass can't be recorded.

        No messages are in flight then: recording may wait for all GPU work, including a message from a rank that waits
        for this rank's message. All data-parallel ranks record in the same step, also if graphs don't serve this one:
        NCCL may register memory with other ranks.
        """
        missing = {
            index: graphs
            for index, graphs in self._graphs.items()
            if graphs.lacks_graphs(plans.get(index, StagePlan()))
        }
        if missing:
            torch.cuda.empty_cache()  # the pools of slots cannot use memory that steps have freed
        for index, graphs in missing.items():
            if len(plans[index].keys) > 1:
                self._sums.add_parameters(graphs.whole_parameters)
        self._sums.attach_to_parameters()
        for index, graphs in missing.items():
            try:
                graphs.record_missing(plans[index])
            except RuntimeError as error:
                raise UserError(describe_capture_error(index, error), exit_code=2) from error
        self._sums.restore_or_zero_sums()
