"""
Executor for MaxText's circular pipeline: one program for all ranks, whose backward pass autograd derives.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Every rank embeds its share of the
microbatches, and computes their heads and losses, so all ranks have the same work. In between, hidden states pass
through all ranks' layers, in as many repeats as a rank has stages.

Messages as autograd nodes: the gradient of a sent tensor is received from the rank that received the tensor.

A rank's simultaneous messages are one exchange. Its start and its arrival are two nodes, so computation between them,
in both passes, hides the latency. If no sent tensor needs a gradient, or no received tensor is used, autograd would
omit the exchange from the backward pass, while the other rank waits for it. So a scalar, the autograd token, passes
through all starts and arrivals, and the backward pass also begins at the token: it repeats every exchange in reverse.

Circular pipeline buffers, named as in MaxText, and the moves between stages in every iteration.

`shift` contains every stage's next input. `state_io` contains inputs, later replaced by outputs, distributed over the
stages: in every iteration one column moves up by one stage, so the first stage gets its next input and the last stage a
free slot for its output. `circ_storage` keeps the last stage's outputs until the first stage needs them in the next
repeat. Early moves read tensors from before the iteration, so they overlap its computation; late moves read its
outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.ports import LOSSES, Group, MicrobatchInputs, P2PChannel, Pending, StepState

Buffer = Literal["shift", "state_io", "circ_storage"]


@attrs.frozen
class Move:
    """Move of a microbatch's tensor into another stage's buffer; `column` is a `state_io` column."""

    source: int
    target: int
    buffer: Buffer
    microbatch: int
    column: int = 0


def list_moves_during_compute(table: Timetable, iteration: int) -> list[Move]:
    """Return moves that overlap an iteration's computation, because their tensors exist before it."""
    moves = [*_iterate_state_io_moves(table, iteration)]
    if table.latency == 2:
        moves += _iterate_output_moves(table, iteration - 1)
    item = table.find_reentering_item(iteration - 1)
    if (
        table.uses_circ_storage and item is not None
    ):  # it waits for an iteration in what MaxText calls circ_storage_mover
        moves.append(Move(table.stages - 1, 0, "circ_storage", item.microbatch))
    return moves


def list_moves_after_compute(table: Timetable, iteration: int) -> list[Move]:
    """Return moves that pass outputs to the next stages right after the iteration; none if forwarding is delayed."""
    return [*_iterate_output_moves(table, iteration)] if table.latency == 1 else []


def _iterate_state_io_moves(table: Timetable, iteration: int) -> Iterator[Move]:
    """Yield moves to the stage before, in the iteration's column of `state_io`."""
    for stage in range(1, table.stages):
        if (microbatch := table.find_moved_microbatch(iteration, stage)) is not None:
            yield Move(stage, stage - 1, "state_io", microbatch, iteration % table.column_count)


def _iterate_output_moves(table: Timetable, iteration: int) -> Iterator[Move]:
    """Yield moves that pass an iteration's outputs to the next stages, and to the first stage if it needs one now."""
    for stage in range(table.stages - 1):
        if (item := table.find_item(iteration, stage)) is not None:
            yield Move(stage, stage + 1, "shift", item.microbatch)
    if not table.uses_circ_storage and (item := table.find_reentering_item(iteration)) is not None:
        yield Move(table.stages - 1, 0, "shift", item.microbatch)


@attrs.define(eq=False)
class Buffers:
    """
    Buffers for consecutive `local_stages`.

    `state_io` contains a row of columns per local stage, and `shift` the next inputs by stage. `circ_storage`, on the
    rank of stage 0, contains reentering outputs by microbatch. `before` and `outputs` are the previous and the current
    iteration's outputs, by stage.
    """

    table: Timetable
    local_stages: range
    state_io: list[list[Tensor | None]]
    shift: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    circ_storage: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    before: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    outputs: dict[int, Tensor] = attrs.field(init=False, factory=dict)

    @classmethod
    def with_inputs(cls, table: Timetable, local_stages: range, inputs: Sequence[Tensor]) -> "Buffers":
        """Return buffers for the first iteration, with the local stages' inputs (...) in microbatch order."""
        remaining = iter(inputs)
        rows: list[list[Tensor | None]] = []
        for stage in local_stages:
            row: list[Tensor | None] = [next(remaining) for _ in table.get_microbatches_stored_on_stage(stage)]
            rows.append(row + [None] * (table.column_count - len(row)))
        return cls(table, local_stages, rows)

    def take_input(self, iteration: int, stage: int) -> Tensor:
        """Remove and return the input (any shape) for a stage with an item in this iteration."""
        if stage == 0 and iteration < self.table.slot_count:
            return self._pop_state_io(0, iteration % self.table.column_count)
        if stage == 0 and self.table.uses_circ_storage:
            return self.circ_storage.pop(iteration % self.table.slot_count)
        return self.shift.pop(stage)

    def take_tensor_to_move(self, move: Move, *, from_this_iteration: bool) -> Tensor:
        """Return the tensor (any shape) to move out of a local stage, as of this or the last iteration."""
        if move.buffer == "state_io":
            return self._pop_state_io(move.source, move.column)
        return (self.outputs if from_this_iteration else self.before)[move.source]

    def store_moved_tensor(self, move: Move, value: Tensor) -> None:
        """Write a move's tensor (any shape) into a local stage's buffer."""
        if move.buffer == "state_io":
            self.state_io[move.target - self.local_stages.start][move.column] = value
        elif move.buffer == "shift":
            self.shift[move.target] = value
        else:
            self.circ_storage[move.microbatch] = value

    def store_finished_output(self, iteration: int) -> None:
        """Write an output that leaves the pipeline in this iteration into the last stage's free `state_io` slot."""
        last = self.table.stages - 1
        if last in self.outputs and self.table.find_finished_microbatch(iteration) is not None:
            self.state_io[-1][iteration % self.table.column_count] = self.outputs[last]

    def collect_outputs(self) -> list[Tensor]:
        """Return these stages' outputs (...) after the last iteration, in microbatch order."""
        columns = [self.table.find_state_io_output_column(number) for number in range(self.table.column_count)]
        return [tensor for row in self.state_io for tensor in (row[column] for column in columns) if tensor is not None]

    def _pop_state_io(self, stage: int, column: int) -> Tensor:
        """Remove and return a tensor (any shape) from `state_io`; LookupError for an empty slot."""
        row = self.state_io[stage - self.local_stages.start]
        # The slot is emptied so that the tensor is freed after its last use.
        value, row[column] = row[column], None
        if value is None:
            slot = f"stage {stage} in column {column}"
            raise LookupError(f"state_io has no tensor for {slot}: it was read before, or never written")
        return value


@attrs.frozen
class Ring:
    """Ring over pipeline ranks: this rank's index, the rank count, and channels to neighbours by index."""

    rank: int = 0
    size: int = 1
    links: Mapping[int, P2PChannel] = attrs.field(factory=dict)


@attrs.frozen
class TensorMeta:
    """Shape, dtype and device for a tensor between stages."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def allocate_empty(self) -> Tensor:
        """Return an uninitialized tensor (...) with this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@attrs.define(eq=False)
class PendingSends:
    """Pending sends, which keep their tensors alive until the sends complete."""

    _sending: list[Pending] = attrs.field(init=False, factory=list)

    def add(self, messages: Sequence[Pending]) -> None:
        """Add sends, and release completed sends."""
        self._sending = [message for message in self._sending if not message.is_completed()]
        self._sending += messages

    def wait_for_all(self) -> None:
        """Wait until all sends have completed."""
        for message in self._sending:
            message.wait()
        self._sending = []


@attrs.define(eq=False)
class RingExchange:
    """
    Tensor exchange with neighbours in the ring.

    `to` lists the tensors to send, and `sources` the tensors to receive: the neighbour's ring index, and the metadata.
    """

    ring: Ring
    pending_sends: PendingSends
    to: Sequence[tuple[int, TensorMeta]]
    sources: Sequence[tuple[int, TensorMeta]]
    _receiving: list[tuple[Pending, Tensor]] = attrs.field(init=False, factory=list)

    def start_transfers(self, tensors: Sequence[Tensor], *, reversed_direction: bool) -> None:
        """Post sends for tensors (any shapes), and receives, without waiting, in reverse in a backward pass."""
        to, sources = (self.sources, self.to) if reversed_direction else (self.to, self.sources)
        links, boxes = self.ring.links, [(source, meta.allocate_empty()) for source, meta in sources]
        # Receives are posted before sends, so that a transport that blocks in a send finds its receiver ready.
        self._receiving = [(links[source].receive(box), box) for source, box in boxes]
        pairs = zip(to, tensors, strict=True)
        self.pending_sends.add([links[peer].send(tensor.detach().contiguous()) for (peer, _), tensor in pairs])

    def wait_for_received_tensors(self) -> list[Tensor]:
        """Wait for the receives, and return the received tensors (any shapes)."""
        incoming, self._receiving = self._receiving, []
        for message, _ in incoming:
            message.wait()
        return [box for _, box in incoming]


def create_exchange_token(pending_sends: PendingSends, device: torch.device) -> Tensor:
    """Return a new autograd token, 0-dimensional, whose backward pass waits until all sends have completed."""
    return _apply_autograd_function(_BeginToken, pending_sends, torch.zeros((), device=device, requires_grad=True))[0]


def start_exchange(exchange: RingExchange, token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Begin an exchange with these tensors (any shape), and return the token."""
    return _apply_autograd_function(_StartExchange, exchange, token, *tensors)[0]


def finish_exchange(exchange: RingExchange, token: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Finish an exchange, and return the token and the received tensors (any shape)."""
    token, *received = _apply_autograd_function(_FinishExchange, exchange, token)
    return token, received


def _apply_autograd_function(node: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    """Return an autograd node's results, always as a tuple."""
    results = node.apply(*arguments)  # type: ignore[no-untyped-call]
    return results if isinstance(results, tuple) else (results,)


class _BeginToken(torch.autograd.Function):
    """Node that creates the autograd token."""

    # Its backward is the last one, and so waits for the sends of gradients.
    @staticmethod
    def forward(ctx: Any, pending_sends: PendingSends, anchor: Tensor) -> Tensor:
        """Return the token, 0-dimensional, given an anchor with the same shape."""
        ctx.pending_sends = pending_sends
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.pending_sends.wait_for_all()
        return None, None


class _StartExchange(torch.autograd.Function):
    """Node that starts an exchange; its backward pass finishes the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: RingExchange, token: Tensor, *tensors: Tensor) -> Tensor:
        """Start sending tensors with any shape and dtype, and return the token, 0-dimensional."""
        exchange.start_transfers(tensors, reversed_direction=False)
        ctx.exchange = exchange
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, gradient, *ctx.exchange.wait_for_received_tensors())


class _FinishExchange(torch.autograd.Function):
    """Node that finishes an exchange; its backward pass starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: RingExchange, token: Tensor) -> tuple[Tensor, ...]:
        """Return the token, 0-dimensional, and the received tensors, with any shape and dtype."""
        ctx.exchange = exchange
        return (token.clone(), *exchange.wait_for_received_tensors())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start_transfers(gradients, reversed_direction=True)
        return None, gradient


@component(impact="safe")
class CircularExecutor(ProgramExecutor):
    """Executor that trains with the circular pipeline, and evaluates with a forward-only program."""

    delayed: bool = setting(
        "forward outputs one iteration later, like MaxText's `pipeline_delay_activation_forwarding`, to hide "
        "message latency",
        default=False,
    )
    embeds_on_every_rank: ClassVar[bool] = True

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield the problems of every executor, and features, which the circular pipeline does not support."""
        yield from super().constraints(node)
        for feature in node.neighbours("features"):
            text = f"[{feature.name}] acts around a program, and the passes of [{node.name}] are one autograd graph"
            yield feature.problem("use", text, f'remove [{feature.name}], or write use = "pipeline.executor"')

    @property
    def _stage_to_rank(self) -> tuple[int, ...]:
        """Return the stages' ranks in evaluation, with embedding and head as separate first and last stages."""
        return (0, *super()._stage_to_rank, self.mesh.sizes.pipeline - 1)

    def run_forward_and_backward(self, state: StepState) -> None:
        self.stages.cast_weights()
        inputs = [self._upload_inputs(batch) for batch in state["batches"]]
        group = self.mesh.pipeline_group
        repeats = (len(self._stage_to_rank) - 2) // group.size
        table = Timetable(group.size, len(inputs), repeats, 2 if self.delayed else 1)
        sends = PendingSends()
        token = create_exchange_token(sends, self.device.device)
        runners = {stage.index: StageRunner(stage, self.objective, state) for stage in self.stages.local}
        passes, share = StagePasses(runners, inputs, token), table.get_microbatches_stored_on_stage(group.rank)
        embedded = [passes.run_differentiable_pass(0, number, inputs[number].inputs) for number in share]
        forward_pass = ForwardPass(
            table,
            Ring(group.rank, group.size, self._links),
            run_block=lambda block, number, tensor: passes.run_differentiable_pass(block + 1, number, tensor),
            metas=[self._infer_stage_tensor_meta(microbatch) for microbatch in inputs],
            buffers=Buffers.with_inputs(table, range(group.rank, group.rank + 1), embedded),
            pending_sends=sends,
            token=token,
        )
        hidden, last = forward_pass.run(), len(self._stage_to_rank) - 1
        losses = [
            passes.run_differentiable_pass(last, number, states) for number, states in zip(share, hidden, strict=True)
        ]
        sends.wait_for_all()
        del hidden, embedded
        # The token starts backward passes on ranks without a loss, which take part in all exchanges of gradients.
        torch.autograd.backward([*losses, forward_pass.token])
        self.stages.move_gradients_to_masters()
        _gather_losses_on_last_stage(state, share, group, self.device.device)

    def _infer_stage_tensor_meta(self, inputs: MicrobatchInputs) -> TensorMeta:
        """Return the metadata for a microbatch's tensor between stages; UserError if a stage returns anything else."""
        like = self.stages.infer_stage_inputs(1, inputs.inputs, inputs.shared)
        if not isinstance(like, Tensor):
            raise UserError(
                f"a stage returns a {type(like).__name__}, but the circular pipeline only passes single tensors; write "
                'use = "pipeline.executor" in [executor], with the schedule pipeline.schedules.looped_bfs',
                2,
            )
        return TensorMeta(like.shape, like.dtype, self.device.device)


def _gather_losses_on_last_stage(
    state: StepState, microbatch_numbers: Sequence[int], group: Group, device: torch.device
) -> None:
    """Move all ranks' losses to the last stage's rank; this rank computed microbatches `microbatch_numbers`."""
    computed = {number: dict(_iterate_loss_tensors(state.microbatch(number)[LOSSES])) for number in microbatch_numbers}
    # A rank without microbatches does not know the names of the sums, but the first rank always has a microbatch.
    first = next(iter(computed.values()), {})
    forms = [[path, [*tensor.shape], str(tensor.dtype)] for path, tensor in first.items()]
    gathered: dict[str, Any] = {"loss": None, "weight": None, "sums": {}}
    for path, shape, dtype in group.gather_json(forms)[0]:
        dtype = getattr(torch, dtype.removeprefix("torch."))
        stacked = torch.zeros(state.microbatches, *shape, dtype=dtype, device=device)
        for number, tensors in computed.items():
            stacked[number] = tensors[tuple(path)]
        group.sum(stacked)
        *parents, name = path
        (gathered["sums"] if parents else gathered)[name] = stacked
    if group.rank < group.size - 1:
        none = torch.zeros(0, device=device)
        gathered = {"loss": none, "weight": none, "sums": {}}
    state[LOSSES] = gathered


def _iterate_loss_tensors(losses: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield a microbatch's loss, weight and sums (any shapes) with their paths, such as `("sums", name)`."""
    yield from ((("loss",), losses["loss"]), (("weight",), losses["weight"]))
    yield from ((("sums", name), tensor) for name, tensor in losses["sums"].items())


@attrs.define(eq=False)
class StagePasses:
    """
    Passes of this rank's stages in one autograd graph, whose backward pass runs the stages backward.

    Parameter gradients are accumulated by microbatch (gradient accumulation), as in any schedule. A stage's sharded
    parameters are gathered before its first pass, and its gradients are reduced with its last backward pass.
    """

    stages: Mapping[int, StageRunner]
    microbatches: Sequence[MicrobatchInputs]
    token: Tensor
    _done: dict[int, int] = attrs.field(init=False, factory=dict)

    def run_differentiable_pass(self, stage: int, microbatch: int, tensor: Tensor) -> Tensor:
        """Return a stage's output (any shape) for a microbatch: a tensor, or the loss on the last stage."""
        runner = self.stages[stage]
        if stage not in self._done and runner.stage.shards is not None and not runner.stage.shards.gathers_per_block:
            runner.shards.start_unshard()
        self._done[stage] = self._done.get(stage, 0) + 1
        # With the token as an input, every pass is part of the graph, even the pass of token ids.
        return _Pass.apply(self, stage, microbatch, self.token, tensor)  # type: ignore[no-any-return, no-untyped-call]

    def run_forward(self, stage: int, microbatch: int, tensor: Tensor) -> Tensor:
        """Run a stage's forward pass, keep its autograd graph for `run_backward`, and return its output (any shape)."""
        inputs, runner = self.microbatches[microbatch], self.stages[stage]
        with torch.enable_grad():
            own = tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            output: Tensor = runner.forward(microbatch, own, inputs.shared, inputs.batch, inputs.finish)
        return output

    def run_backward(self, stage: int, microbatch: int, grad: Tensor) -> Tensor | None:
        """Return the gradient of a stage's input, with its shape, or None for token ids."""
        runner = self.stages[stage]
        self._done[stage] -= 1
        if (shards := runner.stage.shards) is not None and (shards.reduces_per_microbatch or not self._done[stage]):
            runner.reduce_in_next_backward(is_last_in_step=not self._done[stage])
        grads = runner.backward(microbatch, None if runner.last else [grad])
        return grads[0] if grads else None


class _Pass(torch.autograd.Function):
    """Node for a stage's pass on a microbatch; its backward pass runs the stage's own backward pass."""

    @staticmethod
    def forward(ctx: Any, passes: StagePasses, stage: int, microbatch: int, token: Tensor, tensor: Tensor) -> Tensor:
        """Return the stage's output (...) for an input (...); the token is 0-dimensional."""
        ctx.pass_of = passes, stage, microbatch
        return passes.run_forward(stage, microbatch, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        passes, stage, microbatch = ctx.pass_of
        return None, None, None, None, passes.run_backward(stage, microbatch, grad)


RunBlock = Callable[[int, int, Tensor], Tensor]
"""Run a block, by its number among the blocks of all stages, on a microbatch's tensor; the shape stays."""


@attrs.frozen
class _MovesInFlight:
    """Moves in flight: this rank's tensors, and an exchange with other ranks."""

    local: list[tuple[Move, Tensor]]
    incoming: list[Move]
    exchange: RingExchange | None


@attrs.define(eq=False)
class ForwardPass:
    """
    Forward pass over all microbatches, with its state between iterations.

    `metas` are shapes and dtypes between stages by microbatch. The last exchange depends on `token`, the autograd
    token.
    """

    table: Timetable
    ring: Ring
    run_block: RunBlock
    metas: Sequence[TensorMeta]
    buffers: Buffers
    pending_sends: PendingSends
    token: Tensor

    def run(self) -> list[Tensor]:
        """Run all iterations, and return the outputs (...) for this rank's microbatches, in order."""
        for iteration in range(self.table.iteration_count):
            self._run_iteration(iteration)
        return self.buffers.collect_outputs()

    def _run_iteration(self, iteration: int) -> None:
        """Run every stage outside the bubble, and move its output to the next stage."""
        # Early moves overlap the computation of the stages.
        in_flight = self._start_moves(list_moves_during_compute(self.table, iteration), from_this_iteration=False)
        self.buffers.outputs = self._run_stages(iteration)
        self._finish_moves(in_flight)
        self._finish_moves(self._start_moves(list_moves_after_compute(self.table, iteration), from_this_iteration=True))
        self.buffers.store_finished_output(iteration)
        self.buffers.before, self.buffers.outputs = self.buffers.outputs, {}

    def _run_stages(self, iteration: int) -> dict[int, Tensor]:
        """Run the stages outside the bubble, and return their outputs (...) by stage."""
        outputs = {}
        for stage in self.buffers.local_stages:
            if (item := self.table.find_item(iteration, stage)) is not None:
                block = item.repeat * self.table.stages + stage
                tensor = self.buffers.take_input(iteration, stage)
                outputs[stage] = self.run_block(block, item.microbatch, tensor)
        return outputs

    def _start_moves(self, moves: Sequence[Move], *, from_this_iteration: bool) -> _MovesInFlight:
        """Start moves: collect tensors from this rank's stages, and send the ones that leave the rank."""
        local_stages, incoming = self.buffers.local_stages, []
        outgoing: list[tuple[Move, Tensor]] = []
        local: list[tuple[Move, Tensor]] = []
        for move in moves:
            if move.source in local_stages:
                value = self.buffers.take_tensor_to_move(move, from_this_iteration=from_this_iteration)
                (local if move.target in local_stages else outgoing).append((move, value))
            elif move.target in local_stages:
                incoming.append(move)
        if not outgoing and not incoming:
            return _MovesInFlight(local, incoming, None)
        to = [(self._get_ring_rank(move.target), self.metas[move.microbatch]) for move, _ in outgoing]
        sources = [(self._get_ring_rank(move.source), self.metas[move.microbatch]) for move in incoming]
        exchange = RingExchange(self.ring, self.pending_sends, to, sources)
        self.token = start_exchange(exchange, self.token, [value for _, value in outgoing])
        return _MovesInFlight(local, incoming, exchange)

    def _finish_moves(self, in_flight: _MovesInFlight) -> None:
        """Wait for incoming tensors, and write all moved tensors into this rank's buffers."""
        received: list[Tensor] = []
        if in_flight.exchange is not None:
            self.token, received = finish_exchange(in_flight.exchange, self.token)
        for move, value in [*in_flight.local, *zip(in_flight.incoming, received, strict=True)]:
            self.buffers.store_moved_tensor(move, value)

    def _get_ring_rank(self, stage: int) -> int:
        """Return a stage's ring index."""
        return stage // len(self.buffers.local_stages)
