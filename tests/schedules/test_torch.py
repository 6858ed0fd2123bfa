"""Schedules against their orders in `torch.distributed.pipelining`."""

from itertools import product

import pytest

from drawloom.components.pipeline.program.notation import format_program_csv, parse_program_csv
from support.schedules import schedule, texts
from support.torch_schedules import lower, order

SAME = [
    ("ScheduleLoopedBFS", "looped_bfs"),
    ("ScheduleLoopedBFS", "circular"),
    ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
    ("ScheduleInterleavedZeroBubble", "zero_bubble_1p"),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_loops_are_in_the_order_of_torch(theirs: str, ours: str) -> None:
    """Every rank has torch's order of actions, for all microbatch counts that torch accepts."""
    for ranks, stages, microbatches in product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 4, 5, 8, 10, 12, 24)):
        if microbatches % max(1, microbatches // ranks) == 0:
            program = schedule(ours, stages_per_rank=stages).program(ranks, microbatches)
            expected = order(theirs, ranks, stages, microbatches)
            assert [texts(program.rank_program(rank)) for rank in range(ranks)] == expected, (
                ranks,
                stages,
                microbatches,
            )


@pytest.mark.parametrize(
    ("theirs", "ours", "least"),
    [("ScheduleZBVZeroBubble", "zero_bubble_v", 0), ("ScheduleDualPipeV", "dual_pipe_v", 2)],
)
def test_v_schedules_are_in_the_order_of_torch(theirs: str, ours: str, least: int) -> None:
    """Every rank has torch's order of actions and overlaps, for all microbatch counts that torch accepts."""
    for ranks, microbatches in product((1, 2, 3, 4, 6), (1, 2, 4, 5, 8, 10, 12, 24)):
        if microbatches >= least * ranks:
            program = schedule(ours).program(ranks, microbatches)
            expected = order(theirs, ranks, 2, microbatches)
            assert [texts(program.rank_program(rank)) for rank in range(ranks)] == expected, (ranks, microbatches)


def test_1f1b_is_in_the_order_of_torch() -> None:
    """1F1B has torch's order except on the last rank, where torch's listing begins with microbatch 1."""
    program = schedule("one_f_one_b").program(4, 8)
    assert [texts(program.rank_program(rank)) for rank in range(3)] == order("Schedule1F1B", 4, 1, 8)[:3]


def test_gpipe_backwards_start_from_the_newest() -> None:
    """GPipe's forwards are in torch's order, and its backwards in the reverse order, like in the paper."""
    theirs = order("ScheduleGPipe", 4, 1, 8)
    ours = [texts(schedule("gpipe").program(4, 8).rank_program(rank)) for rank in range(4)]
    assert [line[:8] + line[:7:-1] for line in ours] == theirs


@pytest.mark.parametrize("name", ["zero_bubble_v", "dual_pipe_v", "interleaved_1f1b", "v_half"])
def test_torch_reads_our_csv(name: str) -> None:
    """torch reads our CSV, validates it, and lowers it."""
    program = schedule(name).program(4, 8)
    table, owners = lower(format_program_csv(program), 4, 2, 8)
    assert owners == program.stage_to_rank
    back = parse_program_csv(table)
    assert [texts(back.rank_program(rank)) for rank in range(4)] == [
        texts(program.rank_program(rank)) for rank in range(4)
    ]
