"""
What goes from stage to stage in an iteration, and into which buffer.

`shift` holds each stage's next input. `state_io` holds inputs, and outputs in their stead, spread over the stages: a
column of it moves up by one stage in each iteration, so that the first stage finds its next input and the last a free
place for its output. `circ_storage` holds what has come round to the first stage before that has time for it. Early
moves take what was there before the iteration, so they can travel while it computes; late moves take its outputs.
"""

from collections.abc import Iterator
from typing import Literal

import attrs

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
