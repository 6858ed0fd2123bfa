"""The figures of a simulation, as JSON and as text."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from drawloom.components.pipeline.simulation.simulator import Simulation


@attrs.frozen(eq=False)
class Summary:
    """A simulated schedule and its name."""

    schedule: str
    simulation: Simulation

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.simulation.program.ranks

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of each rank."""
        return self.simulation.program.stages // self.ranks

    @property
    def title(self) -> str:
        """The schedule and its size."""
        ranks, stages = _several(self.ranks, "rank"), _several(self.stages_per_rank, "stage")
        microbatches = _several(self.simulation.program.microbatches, "microbatch", "es")
        return f"{self.schedule}: {ranks} × {stages}, {microbatches}"

    @property
    def caption(self) -> str:
        """Makespan, span and bubbles."""
        run = self.simulation
        return (
            f"makespan {run.makespan:g}, ideal {run.ideal:g}: bubble {run.bubble:.1%}; "
            f"longest span of a rank {run.span:g}: bubble {run.span_bubble:.1%}"
        )

    def as_data(self) -> dict[str, Any]:
        """The figures as data for JSON."""
        run = self.simulation
        return {
            "schedule": self.schedule,
            "ranks": self.ranks,
            "stages_per_rank": self.stages_per_rank,
            "microbatches": run.program.microbatches,
            "makespan": run.makespan,
            "ideal": run.ideal,
            "bubble": run.bubble,
            "span_bubble": run.span_bubble,
            "peak_activations": run.peak_activations,
            "peak_live_weights": run.peak_live_weights,
            "actions": run.actions,
            "shard_actions": [
                [{"action": str(bar.action), "start": bar.start, "end": bar.end} for bar in bars]
                for bars in run.shard_bars
            ],
        }

    def by_rank(self) -> str:
        """The peaks of each rank, as a table."""
        run = self.simulation
        columns = (run.peak_activations, run.peak_live_weights, run.peak_pending_weight_grads, run.peak_boundary)
        rows = [(f"rank {rank}", *map(str, row)) for rank, row in enumerate(zip(*columns, strict=True))]
        return table([("peak", "live", "until weights", "weights pending", "messages"), *rows])


def compare(summaries: Iterable[Summary]) -> str:
    """A table of schedules, sorted by bubble, then by memory."""
    rows = [_row(summary) for summary in sorted(summaries, key=_cost)]
    head = ("schedule", "stages", "makespan", "ideal", "bubble", "span bubble", "live", "until weights", "microbatches")
    return f"{table([head, *rows])}\n\n{LEGEND}"


LEGEND = """\
live: the peak of stage-microbatches on a rank between their forward and their (input) gradients
until weights: the same, until their weight gradients; microbatches: the same, divided by a rank's stages"""


def _several(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending * (number != 1)}"


def _cost(summary: Summary) -> tuple[float, float, str]:
    held = max(summary.simulation.peak_live_weights) / summary.stages_per_rank
    return summary.simulation.bubble, held, summary.schedule


def _row(summary: Summary) -> tuple[str, ...]:
    run = summary.simulation
    held = max(run.peak_live_weights)
    return (
        summary.schedule,
        str(summary.stages_per_rank),
        f"{run.makespan:g}",
        f"{run.ideal:g}",
        f"{run.bubble:.1%}",
        f"{run.span_bubble:.1%}",
        str(max(run.peak_activations)),
        str(held),
        f"{held / summary.stages_per_rank:g}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
