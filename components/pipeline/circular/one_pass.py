"""One forward pass of a circular pipeline on this rank: iterations, and the moves of tensors between them."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from drawloom.components.pipeline.circular.buffers import Buffers, Move, early_moves, late_moves
from drawloom.components.pipeline.circular.ring import PendingSends, Ring, RingExchange, TensorMeta, arrive, start
from drawloom.components.pipeline.circular.timetable import Timetable

RunBlock = Callable[[int, int, Tensor], Tensor]
"""Runs a block, by its number among those of all stages, on a microbatch's tensor (...); gives one of its shape."""


@attrs.frozen
class _MovesInFlight:
    """Moves that have begun: tensors that stay on this rank, and an exchange for those from or to other ranks."""

    local: list[tuple[Move, Tensor]]
    incoming: list[Move]
    exchange: RingExchange | None


@attrs.define(eq=False)
class ForwardPass:
    """
    The state of a pass over all microbatches, before its first iteration and after each.

    `metas` has what passes between stages for each microbatch. `token` is the autograd token, on which the last
    exchange depends.
    """

    table: Timetable
    ring: Ring
    run_block: RunBlock
    metas: Sequence[TensorMeta]
    buffers: Buffers
    pending_sends: PendingSends
    token: Tensor

    def run(self) -> list[Tensor]:
        """All iterations; the outputs (...) of this rank's share of microbatches, in their order."""
        for iteration in range(self.table.iterations):
            self._iterate(iteration)
        return self.buffers.results()

    def _iterate(self, iteration: int) -> None:
        """Run every stage that is not in the bubble once, and move its output on."""
        # Early moves travel while the stages compute.
        in_flight = self._begin(early_moves(self.table, iteration), late=False)
        self.buffers.outputs = self._work(iteration)
        self._end(in_flight)
        self._end(self._begin(late_moves(self.table, iteration), late=True))
        self.buffers.put_finished(iteration)
        self.buffers.before, self.buffers.outputs = self.buffers.outputs, {}

    def _work(self, iteration: int) -> dict[int, Tensor]:
        """The outputs (...) of the stages that are not in the bubble."""
        outputs = {}
        for stage in self.buffers.local_stages:
            if (item := self.table.item(iteration, stage)) is not None:
                block = item.repeat * self.table.stages + stage
                given = self.buffers.take_input(iteration, stage)
                outputs[stage] = self.run_block(block, item.microbatch, given)
        return outputs

    def _begin(self, moves: Sequence[Move], *, late: bool) -> _MovesInFlight:
        """Take the tensors that move from this rank's stages, and send those that leave the rank."""
        local_stages, incoming = self.buffers.local_stages, []
        outgoing: list[tuple[Move, Tensor]] = []
        local: list[tuple[Move, Tensor]] = []
        for move in moves:
            if move.source in local_stages:
                value = self.buffers.take(move, late=late)
                (local if move.target in local_stages else outgoing).append((move, value))
            elif move.target in local_stages:
                incoming.append(move)
        if not outgoing and not incoming:
            return _MovesInFlight(local, incoming, None)
        to = [(self._rank(move.target), self.metas[move.microbatch]) for move, _ in outgoing]
        sources = [(self._rank(move.source), self.metas[move.microbatch]) for move in incoming]
        exchange = RingExchange(self.ring, self.pending_sends, to, sources)
        self.token = start(exchange, self.token, [value for _, value in outgoing])
        return _MovesInFlight(local, incoming, exchange)

    def _end(self, in_flight: _MovesInFlight) -> None:
        """Wait for incoming tensors, and put everything that moved into this rank's buffers."""
        came: list[Tensor] = []
        if in_flight.exchange is not None:
            self.token, came = arrive(in_flight.exchange, self.token)
        for move, value in [*in_flight.local, *zip(in_flight.incoming, came, strict=True)]:
            self.buffers.put(move, value)

    def _rank(self, stage: int) -> int:
        return stage // len(self.buffers.local_stages)
