"""Circular pipeline's forward pass on this rank: iterations, and tensor moves between them."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

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
    finish_exchange,
    start_exchange,
)
from drawloom.components.pipeline.circular.timetable import Timetable

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
