"""Schedules that `torch.distributed.pipelining` has too, against torch's own orders."""

from itertools import product

import pytest

from drawloom.components.pipeline.program.notation import read_csv, write_csv
from support.schedules import schedule, texts
from support.torch_schedules import lowered, order

SAME = [
    ("ScheduleLoopedBFS", "looped_bfs"),
    ("ScheduleLoopedBFS", "circular"),
    ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
    ("ScheduleInterleavedZeroBubble", "zero_bubble_1p"),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_loops_are_in_the_order_of_torch(theirs: str, ours: str) -> None:
    """Every rank does the same as in torch, for all numbers of microbatches that torch takes."""
    for ranks, stages, microbatches in product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 4, 5, 8, 10, 12, 24)):
        if microbatches % max(1, microbatches // ranks) == 0:
            program = schedule(ours, stages_per_rank=stages).program(ranks, microbatches)
            wanted = order(theirs, ranks, stages, microbatches)
            assert [texts(program.line(rank)) for rank in range(ranks)] == wanted, (ranks, stages, microbatches)


@pytest.mark.parametrize(
    ("theirs", "ours", "least"),
    [("ScheduleZBVZeroBubble", "zero_bubble_v", 0), ("ScheduleDualPipeV", "dual_pipe_v", 2)],
)
def test_vees_are_in_the_order_of_torch(theirs: str, ours: str, least: int) -> None:
    """Every rank does the same as in torch, overlaps included, for all numbers of microbatches that torch takes."""
    for ranks, microbatches in product((1, 2, 3, 4, 6), (1, 2, 4, 5, 8, 10, 12, 24)):
        if microbatches >= least * ranks:
            program = schedule(ours).program(ranks, microbatches)
            wanted = order(theirs, ranks, 2, microbatches)
            assert [texts(program.line(rank)) for rank in range(ranks)] == wanted, (ranks, microbatches)


def test_1f1b_is_in_the_order_of_torch() -> None:
    """So is 1F1B, but for the last rank, where torch's own listing begins with microbatch 1."""
    program = schedule("one_f_one_b").program(4, 8)
    assert [texts(program.line(rank)) for rank in range(3)] == order("Schedule1F1B", 4, 1, 8)[:3]


def test_gpipe_goes_backward_from_the_newest() -> None:
    """Forwards are in the order of torch, backwards, as in the paper, in the reverse."""
    theirs = order("ScheduleGPipe", 4, 1, 8)
    ours = [texts(schedule("gpipe").program(4, 8).line(rank)) for rank in range(4)]
    assert [line[:8] + line[:7:-1] for line in ours] == theirs


@pytest.mark.parametrize("name", ["zero_bubble_v", "dual_pipe_v", "interleaved_1f1b", "v_half"])
def test_torch_takes_our_tables(name: str) -> None:
    """Torch reads what we write, finds it valid, and puts its own sends and receives into it."""
    program = schedule(name).program(4, 8)
    table, owners = lowered(write_csv(program), 4, 2, 8)
    assert owners == program.stage_to_rank
    back = read_csv(table)
    assert [texts(back.line(rank)) for rank in range(4)] == [texts(program.line(rank)) for rank in range(4)]
