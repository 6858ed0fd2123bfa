"""Results of `drawloom plan`: one plan, the plans of a search, or a calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.planning.checkpoint_interval import CheckpointInterval
from drawloom.components.planning.plan import Plan
from drawloom.components.planning.remedies import Remedy, describe_remedy_for_json, format_remedies
from drawloom.components.planning.search import PlanChoice, format_search_table
from drawloom.components.planning.text import as_data, format_plan
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, internal, output, output_class


@output_class
class RankData:
    """Memory of a pipeline rank, in bytes."""

    stages: Sequence[int] = output("stages of the rank")
    kept: Mapping[str, int] = output("persistent bytes by kind")
    gradients: int = output("gradients at the end of a step")
    peak_gradients: int = output("gradients at the peak")
    activations: Mapping[str, int] = output("activations at the peak, by kind")
    buffers: Mapping[str, int] = output("buffers at the peak, by kind")
    peak: int = output("peak")
    host: int = output("optimizer state and waiting activations in host memory")
    when: str = output("part of the step with the peak")


@output_class
class StageData:
    """Sizes and times of a stage, for one microbatch."""

    pipeline_rank: int = output("pipeline rank of the stage")
    parameters: int = output("number of parameters")
    trained_parameters: int = output("number of trained parameters")
    seconds: Mapping[str, float] = output("seconds by pass")
    activations: Mapping[str, int] = output("bytes kept until the backward pass, by kind")
    sent_bytes: int = output("bytes sent to the next stage")


@output_class
class ChoiceData:
    """A memory policy's choice."""

    recompute: Sequence[str] = output("recompute policy by stage")
    offloaded: Sequence[int] = output("stages whose activations wait in host memory")
    host_states: Sequence[float] = output("fraction of the optimizer's state in host memory, by pipeline rank")


@output_class
class PlanData:
    """Plan of a run on a device."""

    device: str = output("device")
    ranks: int = output("number of processes")
    mesh: Mapping[str, int] = output("mesh sizes by dimension")
    microbatches: int = output("microbatches of a step on each replica")
    document_tokens: float | None = output("mean tokens of a document, if documents limit attention")
    fits: bool = output("whether every rank fits in the memory of the device")
    device_memory_bytes: int | None = output("memory of the device")
    peak_memory_bytes: Sequence[int] = output("peak by rank")
    memory: Sequence[RankData] = output("memory by pipeline rank")
    stages: Sequence[StageData] = output("stages")
    step_seconds: float = output("seconds of a step")
    seconds: Mapping[str, float] = output("seconds of a step by part")
    tokens_per_second: float = output("tokens per second of all ranks")
    mfu: float | None = output("model FLOPs utilization, from 0 to 1")
    run_seconds: float | None = output("seconds of all steps")
    choice: ChoiceData | None = output("choice of the memory policy, if the recipe has one")
    kept_seconds: float | None = output("seconds of a step with unlimited memory, if there is a memory policy")


@output_class
class RemedyData:
    """Settings that need less memory."""

    toml: Sequence[str] = output("settings as lines of TOML")
    cost: str = output("disadvantage of the settings")
    peak_memory_bytes: int = output("largest peak of a rank")
    step_seconds: float = output("seconds of a step")
    ranks: int = output("number of processes")
    fits: bool = output("whether every rank fits")


@output_class
class SavesData:
    """Proposed checkpoint interval."""

    node: str = output("node of the checkpointer")
    every: int = output("steps between saves")
    cost: float = output("seconds of a save")
    between_failures: float = output("mean seconds between failures")
    step: float = output("seconds of a step")
    toml: str = output("setting as a line of TOML")
    lost: float = output("fraction of time lost to saves and repeated steps")


@output_class
class PlanResult(PlanData, Result):
    """Plan of a run on a device, with remedies if it does not fit."""

    remedies: Sequence[RemedyData] = output("settings that need less memory, if the plan does not fit")
    checkpoint: SavesData | None = output("checkpoint interval, with --mtbf only")
    text: str = internal()

    @classmethod
    def from_plan(
        cls, plan: Plan, remedies: Sequence[Remedy], checkpoint_interval: CheckpointInterval | None
    ) -> "PlanResult":
        """Make the result for a plan, its remedies, and the proposed checkpoint interval."""
        parts = [
            format_plan(plan),
            *([] if plan.fits else [format_remedies(remedies)]),
            *([] if checkpoint_interval is None else [str(checkpoint_interval)]),
        ]
        checkpoint = (
            None
            if checkpoint_interval is None
            else SavesData(
                **attrs.asdict(checkpoint_interval),
                toml=checkpoint_interval.toml_line,
                lost=checkpoint_interval.lost_time_fraction,
            )
        )
        return cls(
            **_convert_plan_to_data_fields(plan),
            remedies=[RemedyData(**describe_remedy_for_json(remedy)) for remedy in remedies],
            checkpoint=checkpoint,
            text="\n\n".join(parts),
        )

    @property
    def exit_code(self) -> int:
        """1 if the plan does not fit the device."""
        return OK if self.fits else FAILED

    def render(self, format: str) -> str:
        """Return the plan, the remedies and the interval."""
        return self.text


@output_class
class SearchedPlan(PlanData):
    """Plan of a search."""

    toml: Sequence[str] = output("settings as lines of TOML")


@output_class
class SearchResult(Result):
    """Plans of a search, with --search."""

    plans: Sequence[SearchedPlan] = output("plans, the fastest first")
    overlay: Path | None = output("overlay with the first plan's settings, with --to only")
    text: str = internal()

    @classmethod
    def from_choices(cls, choices: Sequence[PlanChoice], overlay: Path | None) -> "SearchResult":
        """Make the result for the plans of a search, and the written overlay file."""
        plans = [
            SearchedPlan(**_convert_plan_to_data_fields(choice.plan), toml=choice.overlay_toml.splitlines())
            for choice in choices
        ]
        written = [] if overlay is None else [f"the first one is an overlay in {overlay}"]
        return cls(plans, overlay, "\n".join([format_search_table(choices), *written]))

    @property
    def exit_code(self) -> int:
        """1 if no plan fits the device."""
        return OK if self.plans and self.plans[0].fits else FAILED

    def render(self, format: str) -> str:
        """Return the table of the plans."""
        return self.text


@output_class
class CalibrationResult(Result):
    """Measured device, with --calibrate and without a recipe."""

    path: Path = output("file with the measurements, used by later plans")
    toml: str = output("measurements")

    def render(self, format: str) -> str:
        """Return the measurements and their path."""
        return f"{self.toml}\nkept in {self.path}"


def _convert_plan_to_data_fields(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields for `PlanData`."""
    data = as_data(plan)
    memory = [RankData(**rank) for rank in data.pop("memory")]
    choice = data["choice"] and ChoiceData(**data["choice"])
    return data | {
        "memory": memory,
        "stages": [StageData(**stage) for stage in data["stages"]],
        "choice": choice,
    }
