"""
How long a rank takes to build its own program, sends and receives included, beside torch.distributed.pipelining.

CPU time of this process, and by how many MB its memory has grown at most. A rank's own program follows from its own
actions and its neighbours', except for the schedules that search (`auto`, `v_half`), which build that of all ranks.
Torch builds every rank's program on each rank; at 256 ranks that takes minutes, so it is asked for 64, where its time
grows with the square of the number of actions already.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

from drawloom.components.pipeline.program.lowering import lower, program_for
from drawloom.components.ports.pipeline import PartialSchedule
from drawloom.components.ports.program import flat
from support.schedules import NAMES, schedule
from support.torch_schedules import make_schedule

BESIDE = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}
"""Schedules with two stages a rank that torch has too."""


def timed(build: Callable[[], int]) -> tuple[int, float]:
    """How many actions are built, and the least CPU seconds of a few times."""
    found = []
    for _ in range(3):
        began = time.process_time()
        count = build()
        found.append(time.process_time() - began)
    return count, min(found)


def ours(name: str, ranks: int, microbatches: int) -> int:
    """Build the line of a rank in the middle; how many actions and messages it has."""
    rank = ranks // 2
    return len([*flat(lower(program_for(schedule(name), rank, ranks, microbatches), rank))])


def torchs(name: str, ranks: int, microbatches: int) -> int:
    """Build what torch builds on each rank; how many actions and messages one rank has."""
    found: Any = make_schedule(name, ranks, 2, microbatches)
    found._prepare_schedule_with_comms({rank: found._calculate_single_rank_operations(rank) for rank in range(ranks)})
    return len(found.pipeline_order_with_comms[ranks // 2])


def peak() -> int:
    """The most MB that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


SIZES = ((64, 256), (256, 1024), (1024, 4096))


def main() -> None:
    """Print a row for each schedule; those that build all ranks' programs last, as they take most memory."""
    before = peak()
    print(f"{'own program of one rank':28}{'ranks':>6}{'microbatches':>14}{'actions':>9}{'CPU s':>8}{'MB':>6}")
    for name in sorted(NAMES, key=lambda name: not isinstance(schedule(name), PartialSchedule)):
        for ranks, microbatches in SIZES if isinstance(schedule(name), PartialSchedule) else SIZES[:1]:
            count, seconds = timed(lambda n=name, r=ranks, m=microbatches: ours(n, r, m))  # type: ignore[misc]
            grown = peak() - before
            print(f"{name:28}{ranks:6}{microbatches:14}{count:9}{seconds:8.3f}{grown:6}", flush=True)
    for name in NAMES:
        if name in BESIDE:
            began = time.process_time()
            count = torchs(BESIDE[name], 64, 256)
            print(f"{f'{name}, torch':28}{64:6}{256:14}{count:9}{time.process_time() - began:8.3f}", flush=True)
