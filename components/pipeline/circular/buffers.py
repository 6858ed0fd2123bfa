"""
What goes from stage to stage in an iteration, and into which buffer.

`shift` holds each stage's next input. `state_io` holds inputs, and outputs in their stead, spread over the stages: a
column of it moves up by one stage in each iteration, so that the first stage finds its next input and the last a free
place for its output. `circ_storage` holds what has come round to the first stage before that has time for it. Early
moves take what was there before the iteration, so they can travel while it computes; late moves take its outputs.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
from torch import Tensor

from drawloom.components.pipeline.circular.timetable import Timetable

Buffer = Literal["shift", "state_io", "circ_storage"]


@attrs.frozen
class Move:
    """From a stage into a buffer of another: to a column of `state_io`, or a microbatch's place in `circ_storage`."""

    source: int
    target: int
    buffer: Buffer
    place: int = 0


def early_moves(table: Timetable, iteration: int) -> list[Move]:
    """Moves of what the iteration before left: in `state_io`, and as outputs."""
    moves = [*_climbs(table, iteration)]
    if table.latency == 2:
        moves += _hops(table, iteration - 1)
    item = table.comes_round(iteration - 1)
    if table.stores and item is not None:  # it waits for an iteration in what MaxText calls circ_storage_mover
        moves.append(Move(table.stages - 1, 0, "circ_storage", item.microbatch))
    return moves


def late_moves(table: Timetable, iteration: int) -> list[Move]:
    """Moves of what an iteration gave: to the next stages at once, if forwarding is not delayed."""
    return [*_hops(table, iteration)] if table.latency == 1 else []


def _climbs(table: Timetable, iteration: int) -> Iterator[Move]:
    for stage in range(1, table.stages):
        if table.is_wanted(iteration, stage):
            yield Move(stage, stage - 1, "state_io", iteration % table.columns)


def _hops(table: Timetable, iteration: int) -> Iterator[Move]:
    """Outputs of an iteration on their way to the next stage, the last stage's to the first if that takes it now."""
    for stage in range(table.stages - 1):
        if table.item(iteration, stage) is not None:
            yield Move(stage, stage + 1, "shift")
    if not table.stores and table.comes_round(iteration) is not None:
        yield Move(table.stages - 1, 0, "shift")


@attrs.define(eq=False)
class Buffers:
    """
    The buffers of the stages `own`, which are neighbours.

    `state_io` holds for each of them a row of columns, `shift` its next input. `circ_storage` holds, where stage 0 is,
    what has come round, by microbatch. `before` and `outputs` are what stages gave in the last iteration and in this.
    """

    table: Timetable
    own: range
    state_io: list[list[Tensor | None]]
    shift: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    circ_storage: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    before: dict[int, Tensor] = attrs.field(init=False, factory=dict)
    outputs: dict[int, Tensor] = attrs.field(init=False, factory=dict)

    @classmethod
    def of(cls, table: Timetable, own: range, inputs: Sequence[Tensor]) -> "Buffers":
        """Buffers before the first iteration, with the inputs that lie at these stages, in their order."""
        columns = table.columns
        return cls(table, own, [list(inputs[place * columns : (place + 1) * columns]) for place in range(len(own))])

    def take_input(self, iteration: int, stage: int) -> Tensor:
        """What a stage works on in an iteration in which it works."""
        if stage == 0 and iteration < self.table.microbatches:
            return self._taken(0, iteration % self.table.columns)
        if stage == 0 and self.table.stores:
            return self.circ_storage.pop(iteration % self.table.microbatches)
        return self.shift.pop(stage)

    def take(self, move: Move, *, late: bool) -> Tensor:
        """What a move takes away from one of these stages."""
        if move.buffer == "state_io":
            return self._taken(move.source, move.place)
        return (self.outputs if late else self.before)[move.source]

    def put(self, move: Move, value: Tensor) -> None:
        """What a move brings to one of these stages."""
        if move.buffer == "state_io":
            self.state_io[move.target - self.own.start][move.place] = value
        elif move.buffer == "shift":
            self.shift[move.target] = value
        else:
            self.circ_storage[move.place] = value

    def put_finished(self, iteration: int) -> None:
        """What has left the pipeline in an iteration goes where the last stage has a place free."""
        last = self.table.stages - 1
        if last in self.outputs and self.table.is_finished(iteration):
            self.state_io[-1][iteration % self.table.columns] = self.outputs[last]

    def results(self) -> list[Tensor]:
        """The outputs that lie at these stages after the last iteration, in order of their microbatches."""
        columns = [self.table.column(place) for place in range(self.table.columns)]
        return [tensor for row in self.state_io for tensor in (row[column] for column in columns) if tensor is not None]

    def _taken(self, stage: int, column: int) -> Tensor:
        row = self.state_io[stage - self.own.start]
        value, row[column] = row[column], None
        if value is None:
            raise LookupError(f"nothing lies at stage {stage} in column {column}")
        return value
