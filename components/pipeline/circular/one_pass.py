"""One forward pass of a circular pipeline on this rank: iterations, what moves on between them, and what is kept."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.circular.buffers import Buffers, Move, early_moves, late_moves
from drawloom.components.pipeline.circular.ring import (
    Exchange,
    Form,
    PendingSends,
    Ring,
    arrive,
    begin_token,
    end_token,
    start,
)
from drawloom.components.pipeline.circular.stacked_blocks import Running, SideOutputs, Task
from drawloom.components.pipeline.circular.timetable import Item, Timetable


@attrs.frozen
class _Journey:
    """Moves that have begun: values that stay on this rank, and a trip for those that cross its borders."""

    staying: list[tuple[Move, Tensor]]
    coming: list[Move]
    trip: Exchange | None


@attrs.define(eq=False)
class Pass:
    """A pass over all microbatches, as far as it has come; `shared` has what each of them shares."""

    table: Timetable
    ring: Ring
    running: Running
    shared: Sequence[Any]
    form: Form
    buffers: Buffers
    outbox: PendingSends
    thread: Tensor
    sides: dict[tuple[int, int, int], SideOutputs] = attrs.field(init=False, factory=dict)

    @classmethod
    def of(
        cls,
        table: Timetable,
        ring: Ring,
        own: range,
        running: Running,
        inputs: Tensor,
        shared: Sequence[Any],
        weights: Sequence[Tensor],
    ) -> "Pass":
        """A pass before its first iteration."""
        outbox, form = PendingSends(), Form(inputs.shape[1:], inputs.dtype, inputs.device)
        thread = begin_token(outbox, inputs.device, [inputs, *weights])
        return cls(table, ring, running, shared, form, Buffers.of(table, own, inputs.unbind()), outbox, thread)

    def iterate(self, iteration: int) -> None:
        """Let every stage that has something to do run once, and move everything on."""
        underway = self._begin(early_moves(self.table, iteration), late=False)
        self.buffers.outputs = self._work(iteration)
        self._end(underway)
        self._end(self._begin(late_moves(self.table, iteration), late=True))
        self.buffers.put_finished(iteration)
        self.buffers.before, self.buffers.outputs = self.buffers.outputs, {}

    def results(self) -> Tensor | tuple[Tensor, SideOutputs]:
        """What the pipeline gives on this rank."""
        outputs = torch.stack(end_token(self.outbox, self.thread, self.buffers.results()))
        names = next(iter(self.sides.values()), {})
        return (outputs, {name: self._stacked(name) for name in names}) if names else outputs

    def _work(self, iteration: int) -> dict[int, Tensor]:
        """The outputs of the stages that have something to do."""
        own = self.buffers.own
        items = {stage: item for stage in own if (item := self.table.item(iteration, stage)) is not None}
        if not items:
            return {}
        tasks = [self._task(iteration, stage, item) for stage, item in items.items()]
        outputs, sides = self.running.run(tasks)
        for task, item, output, side in zip(tasks, items.values(), outputs, sides, strict=True):
            self._check(output)
            if side:
                self.sides[task.repeat, task.stage, item.microbatch] = side
        return dict(zip(items, outputs, strict=True))

    def _task(self, iteration: int, stage: int, item: Item) -> Task:
        given, shared = self.buffers.take_input(iteration, stage), self.shared[item.microbatch]
        return Task(stage - self.buffers.own.start, item.repeat, given, shared)

    def _check(self, output: Tensor) -> None:
        if (output.shape, output.dtype) != (self.form.shape, self.form.dtype):
            given = f"{str(self.form.dtype).removeprefix('torch.')} {tuple(self.form.shape)}"
            gives = f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
            raise ValueError(f"a block gives what the next one takes, but this one took {given} and gave {gives}")

    def _begin(self, moves: Sequence[Move], *, late: bool) -> _Journey:
        """Take what moves from this rank's stages, and send off what leaves the rank."""
        own, coming = self.buffers.own, []
        leaving: list[tuple[Move, Tensor]] = []
        staying: list[tuple[Move, Tensor]] = []
        for move in moves:
            if move.source in own:
                value = self.buffers.take(move, late=late)
                (staying if move.target in own else leaving).append((move, value))
            elif move.target in own:
                coming.append(move)
        if not leaving and not coming:
            return _Journey(staying, coming, None)
        to, sources = [self._rank(move.target) for move, _ in leaving], [self._rank(move.source) for move in coming]
        trip = Exchange(self.ring, self.outbox, to, sources, self.form)
        self.thread = start(trip, self.thread, [value for _, value in leaving])
        return _Journey(staying, coming, trip)

    def _end(self, journey: _Journey) -> None:
        """Put what has moved where it belongs on this rank."""
        came: list[Tensor] = []
        if journey.trip is not None:
            self.thread, came = arrive(journey.trip, self.thread)
        for move, value in [*journey.staying, *zip(journey.coming, came, strict=True)]:
            self.buffers.put(move, value)

    def _rank(self, stage: int) -> int:
        return stage // len(self.buffers.own)

    def _stacked(self, name: str) -> Tensor:
        """A side output of all blocks of this rank, for all microbatches."""
        table, own = self.table, self.buffers.own
        places = [
            (repeat, stage, microbatch)
            for repeat in range(table.repeats)
            for stage in range(len(own))
            for microbatch in range(table.microbatches)
        ]
        flat = torch.stack([self.sides[place][name] for place in places])
        return flat.view(table.repeats, len(own), table.microbatches, *flat.shape[1:])
