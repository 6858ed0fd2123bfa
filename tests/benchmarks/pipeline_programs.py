"""
Time for a rank to build its own program with sends and receives, compared with torch.distributed.pipelining.

Reported are CPU time and the growth of peak memory in MB. A rank derives its program from its own and its neighbours'
actions; only the searching schedules (`auto`, `v_half`) build the programs of all ranks. torch builds all programs on
every rank. With 256 ranks torch needs minutes, so it runs with 64, where its time already grows quadratically with the
number of actions.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

from drawloom.components.pipeline.program.builders import build_program_with_neighbours
from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.ports.pipeline import PartialSchedule
from drawloom.components.ports.program import iterate_actions
from support.schedules import NAMES, schedule
from support.torch_schedules import make_schedule

BESIDE = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}
"""Schedules with two stages per rank that torch also has."""


def time_build(build: Callable[[], int]) -> tuple[int, float]:
    """Return the number of built actions, and the least CPU seconds in three builds."""
    durations = []
    for _ in range(3):
        began = time.process_time()
        count = build()
        durations.append(time.process_time() - began)
    return count, min(durations)


def build_drawloom(name: str, ranks: int, microbatches: int) -> int:
    """Build a middle rank's program, and return its number of actions and messages."""
    rank = ranks // 2
    return len(
        [
            *iterate_actions(
                lower_to_rank_program(build_program_with_neighbours(schedule(name), rank, ranks, microbatches), rank)
            )
        ]
    )


def build_torch(name: str, ranks: int, microbatches: int) -> int:
    """Build torch's programs for all ranks, and return a middle rank's number of actions and messages."""
    torch_schedule: Any = make_schedule(name, ranks, 2, microbatches)
    torch_schedule._prepare_schedule_with_comms(
        {rank: torch_schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    )
    return len(torch_schedule.pipeline_order_with_comms[ranks // 2])


def peak() -> int:
    """Return this process's peak memory in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


SIZES = ((64, 256), (256, 1024), (1024, 4096))


def main() -> None:
    """Print a row per schedule. Schedules that build all ranks' programs come last, since they need most memory."""
    before = peak()
    print(f"{'own program of one rank':28}{'ranks':>6}{'microbatches':>14}{'actions':>9}{'CPU s':>8}{'MB':>6}")
    for name in sorted(NAMES, key=lambda name: not isinstance(schedule(name), PartialSchedule)):
        for ranks, microbatches in SIZES if isinstance(schedule(name), PartialSchedule) else SIZES[:1]:
            count, seconds = time_build(lambda n=name, r=ranks, m=microbatches: build_drawloom(n, r, m))  # type: ignore[misc]
            growth = peak() - before
            print(f"{name:28}{ranks:6}{microbatches:14}{count:9}{seconds:8.3f}{growth:6}", flush=True)
    for name in NAMES:
        if name in BESIDE:
            began = time.process_time()
            count = build_torch(BESIDE[name], 64, 256)
            print(f"{f'{name}, torch':28}{64:6}{256:14}{count:9}{time.process_time() - began:8.3f}", flush=True)
