"""
Executor for MaxText's circular pipeline: one program for all ranks, whose backward pass autograd derives.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Every rank embeds its share of the
microbatches, and computes their heads and losses, so all ranks have the same work. In between, hidden states pass
through all ranks' layers, in as many repeats as a rank has stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.pipeline.circular.buffers import (
    Buffers,
    Move,
    list_moves_after_compute,
    list_moves_during_compute,
)
from drawloom.components.pipeline.circular.ring import (
    PendingSends,
    Ring,
    RingExchange,
    TensorMeta,
    create_exchange_token,
    finish_exchange,
    start_exchange,
)
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.ports import LOSSES, Group, MicrobatchInputs, StepState


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
