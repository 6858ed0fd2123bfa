"""Results of `drawloom schedule`: one simulated schedule, or a comparison of several."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.components.pipeline.simulation.summary import Summary
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.components.pipeline.simulation.text import draw_text
from drawloom.graph.cli.result import JSON, Result, internal, output, output_class


@output_class
class ActionData:
    """A gather, a reduction or a copy on a rank."""

    action: str = output("notation of the action")
    start: float = output("start, in the unit of the costs")
    end: float = output("end")


@output_class
class ScheduleData:
    """A simulated schedule; times are in the unit of the costs."""

    schedule: str = output("name, or path of a CSV file")
    ranks: int = output("pipeline ranks")
    stages_per_rank: int = output("stages on each rank")
    microbatches: int = output("microbatches of a step")
    makespan: float = output("time of a step")
    ideal: float = output("time without a bubble")
    bubble: float = output("idle fraction of the makespan")
    span_bubble: float = output("idle fraction of a rank's longest span")
    peak_activations: Sequence[int] = output("peak of stage-microbatches until their input gradients, by rank")
    peak_live_weights: Sequence[int] = output("the same until their weight gradients, by rank")
    messages: int = output("tensors that ranks send one another")
    actions: Mapping[str, int] = output("number of actions by kind")
    shard_actions: Sequence[Sequence[ActionData]] = output("gathers and reductions by rank")
    transfers: Sequence[Sequence[ActionData]] = output("copies of activations to host memory and back by rank")
    choice: str | None = output('schedule that was chosen among others, or "search"', default=None)
    recompute: Sequence[str] | None = output("recomputation by stage, if the schedule chooses it", default=None)
    measured_makespan: float | None = output("time of the step in a run, with --run only", default=None)
    activation_bytes: Sequence[int] | None = output("peak bytes of activations by rank, if known", default=None)


@attrs.frozen
class ScheduleResult(ScheduleData, Result):
    """A simulated schedule; times are in the unit of the costs."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON, "csv")

    summary: Summary | None = internal(default=None)

    @classmethod
    def from_summary(cls, summary: Summary) -> "ScheduleResult":
        """Make the result for a simulation's summary."""
        return cls(**make_schedule_data_fields(summary), summary=summary)

    def render(self, format: str) -> str:
        """Return a timeline with a table, an SVG document, or a CSV file of torch.distributed.pipelining."""
        summary = self.summary
        if summary is None:
            return ""
        if format == "svg":
            return draw_svg(summary.simulation, summary.title, summary.caption, summary.measured).removesuffix("\n")
        if format == "csv":
            return format_program_csv(summary.simulation.program).removesuffix("\r\n")
        width = shutil.get_terminal_size((120, 0)).columns
        picture = draw_text(summary.simulation, width, summary.measured).removesuffix("\n")
        return f"{summary.title}\n{summary.caption}\n\n{summary.format_peaks_by_rank()}\n\n{picture}"


@output_class
class ComparisonResult(Result):
    """Simulated schedules, with --compare."""

    schedules: Sequence[ScheduleData] = output("schedules of every size")
    text: str = internal()

    def render(self, format: str) -> str:
        """Return one table per size."""
        return self.text


def make_schedule_data_fields(summary: Summary) -> dict[str, Any]:
    """Return a simulation's fields for `ScheduleData`."""
    data = summary.as_data()
    sides = ("shard_actions", "transfers")
    return data | {name: [[ActionData(**bar) for bar in bars] for bars in data[name]] for name in sides}
