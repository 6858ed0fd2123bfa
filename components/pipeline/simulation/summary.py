"""Simulation summaries, as JSON and as text."""

from collections.abc import Sequence

import attrs

from drawloom.components.pipeline.program.recomputation import describe_recompute_policies
from drawloom.components.pipeline.simulation.simulator import Simulation
from drawloom.graph.cli.terminal import format_table


@attrs.frozen(eq=False)
class Summary:
    """
    Summary of a simulated schedule; `memory` is every rank's peak activation bytes, if known.

    `measured` is the timeline of the same actions in a run.
    """

    schedule: str
    simulation: Simulation
    memory: Sequence[int] | None = None
    measured: Simulation | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.simulation.program.ranks

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages per rank."""
        return self.simulation.program.stages // self.ranks

    @property
    def title(self) -> str:
        """Return the schedule's name and size."""
        ranks, stages = format_count(self.ranks, "rank"), format_count(self.stages_per_rank, "stage")
        microbatches = format_count(self.simulation.program.microbatches, "microbatch", "es")
        chosen = f" ({choice})" if (choice := self.simulation.program.choice) else ""
        return f"{self.schedule}{chosen}: {ranks} × {stages}, {microbatches}"

    @property
    def caption(self) -> str:
        """Return makespan, span, bubbles and recomputation as text."""
        run = self.simulation
        simulated = (
            f"makespan {run.makespan:.5g}, ideal {run.busiest_rank_compute_time:.5g}: "
            f"bubble {run.bubble_fraction:.1%}; longest span of a rank {run.longest_rank_span:.5g}: "
            f"bubble {run.longest_span_bubble_fraction:.1%}"
        )
        if recomputed := describe_recompute_policies(run.program.recompute):
            simulated += f"; recomputed: {recomputed}"
        if run.program.offloaded:
            simulated += f"; offloaded: stages {', '.join(map(str, sorted(run.program.offloaded)))}"
        if self.measured is None:
            return simulated
        seconds = self.measured.makespan
        return f"{simulated}; measured makespan {seconds:.5g}, simulated {run.makespan / seconds - 1:+.1%}"

    def format_peaks_by_rank(self) -> str:
        """Return a table with every rank's peak counts: activations, live and pending weights, messages."""
        run = self.simulation
        columns = (
            run.peak_activations,
            run.peak_microbatches_in_flight,
            run.peak_pending_weight_grads,
            run.peak_p2p_tensors,
        )
        rows = [(f"rank {rank}", *map(str, row)) for rank, row in enumerate(zip(*columns, strict=True))]
        return format_table([("peak", "live", "until weights", "weights pending", "messages"), *rows])


def format_comparison(summaries: Sequence[Summary]) -> str:
    """Return a table of schedules with equal sizes, sorted by makespan, then by memory."""
    ordered = sorted(
        summaries,
        key=lambda summary: (
            round(summary.simulation.makespan, 9),
            max(summary.simulation.peak_microbatches_in_flight) / summary.stages_per_rank,
            summary.schedule,
        ),
    )
    head = ["schedule", "stages", "makespan", "ideal", "bubble", "span bubble", "live", "until weights", "microbatches"]
    head += ["messages", *(["GB"] if any(summary.memory for summary in summaries) else [])]
    return format_table([head, *(_format_row(summary) for summary in ordered)])


LEGEND = """\
makespan: of the same model in each schedule; costs are those of all layers of a rank, which its stages share
live: the peak of stage-microbatches on a rank between their forward and their (input) gradients
until weights: the same, until their weight gradients; microbatches: the same, divided by a rank's stages
messages: tensors that ranks send one another in a step"""


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun, such as `2 stages`; `ending` is the plural's."""
    return f"{number} {noun}{ending * (number != 1)}"


def _format_row(summary: Summary) -> tuple[str, ...]:
    run = summary.simulation
    in_flight = max(run.peak_microbatches_in_flight)
    return (
        summary.schedule,
        str(summary.stages_per_rank),
        f"{run.makespan:.5g}",
        f"{run.busiest_rank_compute_time:.5g}",
        f"{run.bubble_fraction:.1%}",
        f"{run.longest_span_bubble_fraction:.1%}",
        str(max(run.peak_activations)),
        str(in_flight),
        f"{in_flight / summary.stages_per_rank:g}",
        str(run.message_count),
        *([] if summary.memory is None else [f"{max(summary.memory) / 1e9:.3f}"]),
    )
