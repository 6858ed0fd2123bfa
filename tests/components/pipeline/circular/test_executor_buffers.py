"""The buffers of a circular pipeline."""

import pytest
import torch

from drawloom.components.pipeline.circular.executor import Buffers, Move
from drawloom.components.pipeline.circular.timetable import Timetable


def test_taken_tensors_are_released() -> None:
    """No buffer keeps a tensor after its last read, so its memory is freed."""
    table = Timetable(2, 4, 2)
    buffers = Buffers.with_inputs(table, range(2), list(torch.arange(4.0)))
    assert float(buffers.take_input(0, 0)) == 0
    assert float(buffers.take_tensor_to_move(Move(1, 0, "state_io", 2, 0), from_this_iteration=False)) == 2
    assert [[None if slot is None else float(slot) for slot in row] for row in buffers.state_io] == [
        [None, 1],
        [None, 3],
    ]
    for move, iteration, stage in (
        (Move(0, 1, "shift", 0), 1, 1),
        (Move(1, 0, "circ_storage", 3), 7, 0),
    ):
        buffers.store_moved_tensor(move, torch.tensor(9.0))
        assert float(buffers.take_input(iteration, stage)) == 9
        with pytest.raises(KeyError):
            buffers.take_input(iteration, stage)
    with pytest.raises(LookupError, match="state_io has no tensor for stage 0 in column 0"):
        buffers.take_input(0, 0)


def test_a_rank_has_the_inputs_of_its_stages() -> None:
    """On a rank with the last two of four stages, rows of state_io are indexed from its first stage."""
    buffers = Buffers.with_inputs(Timetable(4, 8), range(2, 4), list(torch.arange(4.0)))
    assert float(buffers.take_tensor_to_move(Move(2, 1, "state_io", 5, 1), from_this_iteration=False)) == 1
    buffers.store_moved_tensor(Move(3, 2, "state_io", 7, 1), torch.tensor(5.0))
    assert float(buffers.take_tensor_to_move(Move(2, 1, "state_io", 5, 1), from_this_iteration=False)) == 5


def test_slots_without_a_microbatch_are_empty() -> None:
    """Three microbatches of two stages: the last stage has one input, and at the end one output."""
    buffers = Buffers.with_inputs(Timetable(2, 3), range(1, 2), [torch.tensor(2.0)])
    assert buffers.state_io == [[torch.tensor(2.0), None]]
    assert [float(tensor) for tensor in buffers.collect_outputs()] == [2.0]
