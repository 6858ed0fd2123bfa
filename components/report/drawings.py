"""Picture of a run's schedule, if it is small enough for a page."""

from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.ports import Schedule

FOLDER = "pipeline.schedules."
MAX_PASSES = 1500
"""Largest product of stages and microbatches: a picture needs about 700 bytes per stage and microbatch."""


def draw_schedule_svg(schedule_name: str, schedule: Schedule, ranks: int, microbatches: int) -> str:
    """
    Draw a step's simulated timeline as SVG.

    Returns "" for a single rank, which runs one microbatch after another, and for a schedule too large for a page.
    """
    if ranks < 2 or len(schedule.stage_to_rank(ranks)) * microbatches > MAX_PASSES:
        return ""
    try:
        summary = Summary(
            schedule_name.removeprefix(FOLDER), simulate(schedule.program(ranks, microbatches), Costs(), "free")
        )
    except DeadlockError:
        return ""
    return draw_svg(summary.simulation, summary.title, summary.caption)
