"""
Circular pipeline buffers, named as in MaxText, and the moves between stages in every iteration.

`shift` contains every stage's next input. `state_io` contains inputs, later replaced by outputs, distributed over the
stages: in every iteration one column moves up by one stage, so the first stage gets its next input and the last stage a
free slot for its output. `circ_storage` keeps the last stage's outputs until the first stage needs them in the next
repeat. Early moves read tensors from before the iteration, so they overlap its computation; late moves read its
outputs.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
from torch import Tensor

from drawloom.components.pipeline.circular.timetable import Timetable

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
