"""The picture of a run's schedule, as far as it is small enough for a page."""

from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.components.ports.pipeline import Schedule

FOLDER = "pipeline.schedules."
MOST_WORK = 1500
"""Ranks times microbatches times stages of a rank: a picture has about 700 bytes for each."""


def draw_schedule(use: str, schedule: Schedule, ranks: int, microbatches: int) -> str:
    """
    The simulated timeline of a step as SVG.

    Empty for a single rank, on which microbatches follow one another, and for a schedule that is too large for a page.
    """
    if ranks < 2 or len(schedule.stage_to_rank(ranks)) * microbatches > MOST_WORK:
        return ""
    try:
        summary = Summary(use.removeprefix(FOLDER), simulate(schedule.program(ranks, microbatches), Costs(), "free"))
    except DeadlockError:
        return ""
    return draw_svg(summary.simulation, summary.title, summary.caption)
