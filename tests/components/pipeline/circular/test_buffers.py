"""What lies between stages."""

import pytest
import torch

from drawloom.components.pipeline.circular.buffers import Buffers, Move
from drawloom.components.pipeline.circular.timetable import Timetable


def test_what_is_taken_is_gone() -> None:
    """No buffer keeps a tensor that nobody will read again, so that memory is free as soon as it can be."""
    table = Timetable(2, 4, 2)
    buffers = Buffers.of(table, range(2), list(torch.arange(4.0)))
    assert float(buffers.take_input(0, 0)) == 0
    assert float(buffers.take(Move(1, 0, "state_io", 0), late=False)) == 2
    assert [[None if slot is None else float(slot) for slot in row] for row in buffers.state_io] == [
        [None, 1],
        [None, 3],
    ]
    for move, iteration, stage in (
        (Move(0, 1, "shift"), 1, 1),
        (Move(1, 0, "circ_storage", 3), 7, 0),
    ):
        buffers.put(move, torch.tensor(9.0))
        assert float(buffers.take_input(iteration, stage)) == 9
        with pytest.raises(KeyError):
            buffers.take_input(iteration, stage)
    with pytest.raises(LookupError, match="nothing lies at stage 0 in column 0"):
        buffers.take_input(0, 0)


def test_a_share_of_the_stages_has_a_share_of_the_inputs() -> None:
    """A rank with the last two of four stages counts its rows from its first stage."""
    buffers = Buffers.of(Timetable(4, 8), range(2, 4), list(torch.arange(4.0)))
    assert float(buffers.take(Move(2, 1, "state_io", 1), late=False)) == 1
    buffers.put(Move(3, 2, "state_io", 1), torch.tensor(5.0))
    assert float(buffers.take(Move(2, 1, "state_io", 1), late=False)) == 5
