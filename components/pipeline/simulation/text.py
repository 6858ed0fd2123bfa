"""Timeline as text: a row per rank, a few columns per time unit."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from drawloom.components.pipeline.program.builders import index_stages_on_ranks
from drawloom.components.pipeline.simulation.simulator import Bar, Simulation
from drawloom.ports import Action

LEGEND = "F forward, B backward, I input gradients, W weight gradients"
SHARD_LABELS = {"UNSHARD": "U", "REDUCE_SCATTER": "S", "REDUCE_GRAD": "R"}
SHARD_LEGEND = "second rows: U a stage's weights are gathered, R its gradients reduced, S those so far"
TRANSFER_LABELS = {"OFFLOAD": ">", "RELOAD": "<"}
TRANSFER_LEGEND = "rows of the link: > activations leave for host memory, < they return"

MAX_COLUMNS, MAX_COLUMNS_PER_ACTION = 10_000, 10
"""
Limits for a timeline's width: MAX_COLUMNS, or MAX_COLUMNS_PER_ACTION for every action on a rank, whichever is larger.

If some actions take seconds and others hours, a column per second would be gigabytes of text.
"""


def draw_text(simulation: Simulation, width: int = 120, measured: Simulation | None = None) -> str:
    """
    Return the timeline in bands of at most `width` columns, with the measured timeline below every rank's row, if any.

    Actions are labelled by op and microbatch, or only by op if the timeline would take more than four bands.
    """
    labels = _Labels(simulation)
    lengths = simulation.end - simulation.start
    # Some measured costs may be tiny.
    shortest = max(float(lengths[lengths > 0].min()), float(np.median(lengths)) / 4)
    margin = max(len(f"rank {simulation.program.ranks - 1}  "), len("measured  ") if measured else 0)
    scale = (labels.longest + 1) / shortest
    # More than four bands would not fit on a screen.
    if simulation.makespan * scale > 4 * (width - margin):
        labels, scale = _Labels(simulation, brief=True), 1 / shortest
    longest = max(timeline.makespan for timeline in (simulation, measured or simulation))
    most = max(MAX_COLUMNS, MAX_COLUMNS_PER_ACTION * int(np.diff(simulation.program.bounds).max()))
    scale = min(scale, most / longest)
    rows: list[tuple[str, str]] = []
    for rank in range(simulation.program.ranks):
        rows.append((f"rank {rank}", _draw_row(simulation, rank, labels, scale)))
        if measured is not None:
            rows.append(("measured", _draw_row(measured, rank, labels, scale)))
        if simulation.shard_bars:
            rows.append(("", _draw_side_row(simulation.shard_bars[rank], scale, SHARD_LABELS)))
        for op in TRANSFER_LABELS if simulation.transfer_bars else ():
            bars = [bar for bar in simulation.transfer_bars[rank] if bar.action.op == op]
            rows.append(("", _draw_side_row(bars, scale, TRANSFER_LABELS)))
    cell = max(1, round(scale * shortest))
    bands = list(_cut_into_bands(rows, margin, (width - margin) // cell * cell))
    shards = f"{SHARD_LEGEND}\n" if simulation.shard_bars else ""
    transfers = f"{TRANSFER_LEGEND}\n" if simulation.transfer_bars else ""
    return "\n\n".join(bands) + f"\n\n{LEGEND}{labels.legend}\n{shards}{transfers}"


class _Labels:
    """Action labels: lower case for a rank's second stage, with stage numbers if a rank has more than two."""

    def __init__(self, simulation: Simulation, *, brief: bool = False) -> None:
        program = simulation.program
        self.brief = brief
        self.local_stage = index_stages_on_ranks(program.stage_to_rank)
        self.stages_per_rank = 1 + max(self.local_stage)
        self.has_stage_numbers = self.stages_per_rank > 2 and not brief
        numbers = len(str(max(0, program.microbatches - 1)))
        self.longest = 1 if brief else 1 + numbers + (len(str(program.stages - 1)) if self.has_stage_numbers else 0)

    @property
    def legend(self) -> str:
        """Explain how labels distinguish stages."""
        if self.has_stage_numbers:
            return "; labels: stage, op, microbatch"
        return "; small letters: the rank's second stage" * (self.stages_per_rank > 1)

    def get_label(self, action: Action) -> str:
        """Return an action's label."""
        if self.has_stage_numbers:
            return str(action)
        work = action.op.lower() if self.local_stage[action.stage] == 1 else action.op
        return work if self.brief else f"{work}{action.microbatch}"


def _draw_row(simulation: Simulation, rank: int, labels: _Labels, scale: float) -> str:
    """Return a rank's timeline on one line, with `scale` columns per unit of time."""
    row, blank = "", "·" if labels.brief else " "
    for bar in simulation.iterate_bars(rank):
        row = row.ljust(round(bar.start * scale), blank)
        length, label = round(bar.end * scale) - len(row), labels.get_label(bar.action)
        if labels.brief:
            row += label * length
        elif length:
            row = row[:-1] + "|" if bar.overlaps_previous and len(row) == round(bar.start * scale) else row
            row += label.ljust(length - 1, "-") + " "
    return row.ljust(round(simulation.makespan * scale), blank)


def _draw_side_row(bars: Sequence[Bar], scale: float, labels: Mapping[str, str]) -> str:
    """Return a rank's actions on shards by stage, or its transfers by microbatch, as one line."""
    row = ""
    for bar in bars:
        row = row.ljust(round(bar.start * scale))
        action = bar.action
        label = f"{labels[action.op]}{action.microbatch if action.op in TRANSFER_LABELS else action.stage}"
        # Actions without duration are shown, too.
        row += label.ljust(round(bar.end * scale) - len(row) - 1, "-") + " "
    return row


def _cut_into_bands(rows: list[tuple[str, str]], margin: int, width: int) -> Iterator[str]:
    """Yield the named rows cut into pieces with `width` columns, one below the other."""
    for left in range(0, max(len(row) for _, row in rows), width):
        lines = ((name.ljust(margin) + row[left : left + width]).rstrip() for name, row in rows)
        yield "\n".join(lines)
