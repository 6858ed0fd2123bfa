"""The generated part of schedules.md: a table, and the source, idea and picture of every schedule."""

import inspect
import sys
from collections.abc import Callable

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import Simulation, simulate
from drawloom.components.pipeline.simulation.text import draw_text
from drawloom.components.ports.pipeline import Schedule
from generate.catalogue import specs
from generate.source import ROOT

PAGE = ROOT / "docs" / "schedules.md"
FOLDER = "pipeline.schedules."
INFORMED = {"auto": {"comm": 0.25}, "v_half": {"comm": 0.5}, "v_min": {"comm": 0.5}}
"""Settings by which schedules know of slow messages: as parts of a forward of all of a rank's layers, or of a stage."""
HEAD = "## The schedules\n"

TEXT = """\
The table is for 8 ranks with 32 microbatches. Forward, input gradients and weight gradients of a rank's layers take 1
each; a rank with two stages has half of its layers in each. *Slow messages* take 0.25; `auto`, `v_half` and `v_min`
know this from their setting `comm`. *Memory* is the peak number of microbatches whose activations a rank keeps until
weight gradients, counted in all of its layers. A *split* backward pass sends the gradients of a stage's inputs before
it computes the gradients of its weights.

| schedule | stages a rank | bubble | with slow messages | memory | backward |
|-|-|-|-|-|-|
"""

COLUMNS = 118
"""The pictures fit a terminal of this width, and a page."""


def schedules_part() -> str:
    """The table of all schedules, sorted by bubble, and a section for each."""
    classes = {spec.use.removeprefix(FOLDER): spec.cls for spec in specs() if spec.use.startswith(FOLDER)}
    rows = sorted((_row(name, cls) for name, cls in classes.items()), key=lambda row: row[0])
    sections = [_section(name, cls()) for name, cls in classes.items()]
    return "\n".join([HEAD, TEXT + "".join(row for _, row in rows), *sections])


def page() -> str:
    """The whole page, with this part made anew."""
    written = PAGE.read_text("utf-8")
    return written[: written.index(HEAD)] + schedules_part()


def _row(name: str, cls: Callable[..., Schedule]) -> tuple[float, str]:
    run, late = _simulated(cls(), 0.0), _simulated(cls(**INFORMED.get(name, {})), 0.25)
    stages = run.program.stages // run.program.ranks
    split = {0: "whole", run.action_counts["F"]: "split"}.get(run.action_counts["I"], "both")
    held = max(run.peak_microbatches_in_flight) / stages
    cells = (
        f"[{name}](#{name})",
        stages,
        f"{run.bubble_fraction:.1%}",
        f"{late.bubble_fraction:.1%}",
        f"{held:g}",
        split,
    )
    return run.bubble_fraction, f"| {' | '.join(map(str, cells))} |\n"


def _simulated(schedule: Schedule, comm: float) -> Simulation:
    share = 8 / len(schedule.stage_to_rank(8))
    return simulate(schedule.program(8, 32), Costs(share, share, share, comm=comm))


def _section(name: str, schedule: Schedule) -> str:
    about = inspect.getdoc(sys.modules[type(schedule).__module__]) or ""
    picture = draw_text(simulate(schedule.program(3, 5), Costs()), COLUMNS).rstrip()
    return f"### {name}\n\n{about.strip()}\n\n```text\n{picture}\n```\n"
