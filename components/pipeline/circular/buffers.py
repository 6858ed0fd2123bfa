"""
What lies between the stages of this rank: their next inputs, what comes round, and inputs and outputs of the pipeline.

Buffers are tables of tensors, not tensors: moving on by one moves references, and copies nothing. What nobody will
read again is let go of at once.
"""

from collections.abc import Sequence

import attrs
from torch import Tensor

from drawloom.components.pipeline.circular.moves import Move
from drawloom.components.pipeline.circular.timetable import Timetable


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
