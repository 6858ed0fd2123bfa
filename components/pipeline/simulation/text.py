"""A timeline as text: a row for each rank, a few columns for each unit of time."""

from collections.abc import Iterator

from drawloom.components.pipeline.program.builders import stages_of
from drawloom.components.pipeline.simulation.simulator import Simulation
from drawloom.components.ports.program import Action

LEGEND = "F forward, B backward, I towards inputs, W towards weights"


def draw_text(simulation: Simulation, width: int = 120) -> str:
    """
    The timeline in bands of at most `width` columns.

    Each action is named by its work and its microbatch, unless that takes more than four bands: then by its work alone.
    """
    labels = _Labels(simulation)
    shortest = min(end - start for start, end in zip(simulation.start, simulation.end, strict=True) if end > start)
    margin = len(f"rank {simulation.program.ranks - 1}  ")
    scale = (labels.longest + 1) / shortest
    if simulation.makespan * scale > 4 * (width - margin):
        labels, scale = _Labels(simulation, brief=True), 1 / shortest
    rows = [_row(simulation, rank, labels, scale) for rank in range(simulation.program.ranks)]
    cell = max(1, round(scale * shortest))
    bands = list(_bands(rows, margin, (width - margin) // cell * cell))
    return "\n\n".join(bands) + f"\n\n{LEGEND}{labels.legend}\n"


class _Labels:
    """What actions are called: small letters for a rank's second stage, and numbers of stages if a rank has more."""

    def __init__(self, simulation: Simulation, *, brief: bool = False) -> None:
        program = simulation.program
        self.brief = brief
        self.own = {
            stage: stages_of(rank, program.stage_to_rank).index(stage)
            for stage, rank in enumerate(program.stage_to_rank)
        }
        self.most = 1 + max(self.own.values())
        numbers = len(str(max(0, program.microbatches - 1)))
        self.longest = 1 if brief else 1 + numbers + (len(str(program.stages - 1)) if self.most > 2 else 0)

    @property
    def legend(self) -> str:
        """What tells a rank's stages apart."""
        return {1: "", 2: "; small letters: the rank's second stage"}.get(
            self.most, "; stage before, microbatch behind"
        )

    def of(self, action: Action) -> str:
        """An action's label."""
        if self.most > 2 and not self.brief:
            return str(action)
        work = action.op.lower() if self.own[action.stage] == 1 else action.op
        return work if self.brief else f"{work}{action.microbatch}"


def _row(simulation: Simulation, rank: int, labels: _Labels, scale: float) -> str:
    row, blank = "", "·" if labels.brief else " "
    for bar in simulation.line(rank):
        row = row.ljust(round(bar.start * scale), blank)
        length, label = round(bar.end * scale) - len(row), labels.of(bar.action)
        if labels.brief:
            row += label * length
        elif length:
            row = row[:-1] + "|" if bar.overlaps_previous and len(row) == round(bar.start * scale) else row
            row += label.ljust(length - 1, "-") + " "
    return row.ljust(round(simulation.makespan * scale), blank)


def _bands(rows: list[str], margin: int, width: int) -> Iterator[str]:
    for left in range(0, max(map(len, rows)), width):
        yield "\n".join(f"rank {n}".ljust(margin) + row[left : left + width].rstrip() for n, row in enumerate(rows))
