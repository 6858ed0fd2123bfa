"""One forward pass of a circular pipeline on this rank: iterations, and the moves of tensors between them."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.circular.buffers import Buffers, Move, early_moves, late_moves
from drawloom.components.pipeline.circular.ring import (
    Exchange,
    PendingSends,
    Ring,
    TensorMeta,
    arrive,
    begin_token,
    end_token,
    start,
)
from drawloom.components.pipeline.circular.stacked_blocks import BlockRunner, SideOutputs, Task
from drawloom.components.pipeline.circular.timetable import Item, Timetable


@attrs.frozen
class _MovesInFlight:
    """Moves that have begun: tensors that stay on this rank, and an exchange for those from or to other ranks."""

    local: list[tuple[Move, Tensor]]
    incoming: list[Move]
    exchange: Exchange | None


@attrs.define(eq=False)
class ForwardPass:
    """The state of a pass over all microbatches; `shared` has a value for each microbatch."""

    table: Timetable
    ring: Ring
    runner: BlockRunner
    shared: Sequence[Any]
    meta: TensorMeta
    buffers: Buffers
    pending_sends: PendingSends
    token: Tensor
    sides: dict[tuple[int, int, int], SideOutputs] = attrs.field(init=False, factory=dict)

    @classmethod
    def of(
        cls,
        table: Timetable,
        ring: Ring,
        local_stages: range,
        runner: BlockRunner,
        inputs: Tensor,
        shared: Sequence[Any],
        weights: Sequence[Tensor],
    ) -> "ForwardPass":
        """A pass before its first iteration: inputs (local microbatches, ...), weights of any shape."""
        pending_sends, meta = PendingSends(), TensorMeta(inputs.shape[1:], inputs.dtype, inputs.device)
        token = begin_token(pending_sends, inputs.device, [inputs, *weights])
        return cls(
            table, ring, runner, shared, meta, Buffers.of(table, local_stages, inputs.unbind()), pending_sends, token
        )

    def iterate(self, iteration: int) -> None:
        """Run every stage that is not in the bubble once, and move its output on."""
        # Early moves travel while the stages compute.
        in_flight = self._begin(early_moves(self.table, iteration), late=False)
        self.buffers.outputs = self._work(iteration)
        self._end(in_flight)
        self._end(self._begin(late_moves(self.table, iteration), late=True))
        self.buffers.put_finished(iteration)
        self.buffers.before, self.buffers.outputs = self.buffers.outputs, {}

    def results(self) -> Tensor | tuple[Tensor, SideOutputs]:
        """The pipeline's outputs on this rank, (local microbatches, ...), with side outputs if blocks have any."""
        outputs = torch.stack(end_token(self.pending_sends, self.token, self.buffers.results()))
        names = next(iter(self.sides.values()), {})
        return (outputs, {name: self._stacked(name) for name in names}) if names else outputs

    def _work(self, iteration: int) -> dict[int, Tensor]:
        """The outputs of the stages that are not in the bubble."""
        local_stages = self.buffers.local_stages
        items = {stage: item for stage in local_stages if (item := self.table.item(iteration, stage)) is not None}
        if not items:
            return {}
        tasks = [self._task(iteration, stage, item) for stage, item in items.items()]
        outputs, sides = self.runner.run(tasks)
        for task, item, output, side in zip(tasks, items.values(), outputs, sides, strict=True):
            self._check(output)
            if side:
                self.sides[task.repeat, task.stage, item.microbatch] = side
        return dict(zip(items, outputs, strict=True))

    def _task(self, iteration: int, stage: int, item: Item) -> Task:
        given, shared = self.buffers.take_input(iteration, stage), self.shared[item.microbatch]
        return Task(stage - self.buffers.local_stages.start, item.repeat, given, shared)

    def _check(self, output: Tensor) -> None:
        if (output.shape, output.dtype) != (self.meta.shape, self.meta.dtype):
            given = f"{str(self.meta.dtype).removeprefix('torch.')} {tuple(self.meta.shape)}"
            gives = f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
            raise ValueError(
                f"a block's output has the shape and dtype of its input, but this one took {given} and gave {gives}"
            )

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
        to, sources = [self._rank(move.target) for move, _ in outgoing], [self._rank(move.source) for move in incoming]
        exchange = Exchange(self.ring, self.pending_sends, to, sources, self.meta)
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

    def _stacked(self, name: str) -> Tensor:
        """A side output of all blocks of this rank: (repeats, local stages, microbatches, ...)."""
        table, local_stages = self.table, self.buffers.local_stages
        places = [
            (repeat, stage, microbatch)
            for repeat in range(table.repeats)
            for stage in range(len(local_stages))
            for microbatch in range(table.microbatches)
        ]
        flat = torch.stack([self.sides[place][name] for place in places])
        return flat.view(table.repeats, len(local_stages), table.microbatches, *flat.shape[1:])
