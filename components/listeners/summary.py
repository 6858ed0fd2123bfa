"""Header before a run's first step, and summary after its last step."""

import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from drawloom import Every, component, internal
from drawloom.ports import (
    Batching,
    DescribedStages,
    Device,
    EpochCounter,
    Event,
    EventKind,
    LanguageModel,
    LayerRange,
    Mesh,
    Model,
    NodeState,
    PackedDataset,
    Precision,
    Processes,
    RunInfo,
    Step,
    ValidationData,
    count_steps_of_epochs,
)

log = logging.getLogger("drawloom.run")

HIDDEN_FILES = {"run.lock", "export.workspace"}  # of no use to a person
MIN_FULL_RATE = 0.99  # packed rows are full except the last row


@component(impact="safe")
class RunSummary:
    """
    Header with a run's parts, logged at the start, and summary with its results, logged at the end.

    `drawloom run --dry-run` prints the header without a run. Checkpoints contain the best validation loss, so a resumed
    run's summary covers the whole run; time and tokens count this process only.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("run_started", "phase_ended", "step_ended", "run_ended")

    job: RunInfo
    mesh: Mesh
    device: Device
    models: Every[Model]
    data: Every[PackedDataset]
    validation: Every[ValidationData]
    batching: Every[Batching]
    counters: Every[EpochCounter]
    precision: Every[Precision]
    launches: Every[Processes]
    stages: Every[DescribedStages]

    clock: Callable[[], float] = internal(time.monotonic)
    _began: float = internal(0.0)
    _first: int = internal(0)
    _last: int = internal(0)
    _tokens: int = internal(0)
    _newest: Step | None = internal(None)
    _best: dict[str, Any] = internal(factory=dict)

    def state_dict(self) -> NodeState:
        """Return `value` and `step` of the best validation loss and reward so far; empty without validation."""
        return dict(self._best)

    def load_state_dict(self, state: NodeState) -> None:
        self._best = dict(state)

    def preview(self) -> str:
        """Return the header, with one subject per line."""
        return "\n".join(f"{label:8}{text}" for label, text in self._header_lines())

    def on_event(self, event: Event) -> None:
        """Log the header when the run starts, count its steps, and log the summary when it ends."""
        if event.kind == "run_started":
            self._began = self.clock()
            log.info("%s", self.preview())
        elif event.kind == "phase_ended" and event.step is not None:
            # at the end of phases, because a later phase of the step may save a checkpoint
            # Keep the step's validation loss if it is the lowest, and its reward if it is the highest
            for name, best in (("validation_loss", min), ("validation_reward", max)):
                if name in event.step.state:
                    value, known = event.step.state.number(name), self._best.get(name)
                    if known is None or (value != known["value"] and best(value, known["value"]) == value):
                        self._best[name] = {"value": value, "step": event.step.index}
        elif event.kind == "step_ended" and event.step is not None:
            # Count the step's tokens; on a GPU one step later
            self._first, self._last = self._first or event.step.index, event.step.index
            before, self._newest = self._newest, event.step
            # On a GPU the host does not know this step's tokens yet, and does not wait for them.
            for ended in (before, event.step if event.step.is_last else None):
                self._tokens += ended.tokens if ended is not None else 0
        elif event.kind == "run_ended":
            log.info("%s", "\n".join(f"{label:8}{text}" for label, text in self._summary_lines()))

    def _header_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the header as (subject, text): run, model, data, device."""
        yield "run", f"{self.job.name}, in {self.job.folder_path}"
        for model in self.models.values():
            whole = _build_whole_model_on_meta(model)
            by_stages = (stages.describe_features(whole) for stages in self.stages.values() if stages.model is model)
            count = f"{sum(parameter.numel() for parameter in whole.parameters()):,} parameters"
            phrases = [*self._describe_weight_dtypes(whole), *chain.from_iterable(by_stages)]
            yield "model", ", ".join([*_list_architectures(model), count, *phrases])
        for rows in self.data.values():
            steps = (_describe_tokens_per_step(rows, batching) for batching in self.batching.values())
            epochs = map(_describe_epoch, self.counters.values())
            validation = map(_format_validation_row_counts, self.validation.values())
            # Estimate the training tokens without padding
            tokens = f"{round(rows.fill_rate('train') * rows.count_rows('train') * rows.length):,} tokens to learn from"
            yield "data", "; ".join([tokens, *epochs, *steps, *validation])
        yield "device", self._describe_device()

    def _describe_weight_dtypes(self, whole: nn.Module) -> Iterator[str]:
        """Yield the dtypes of weights and computation, with the count of frozen weights in another format."""
        for precision in self.precision.values():
            stored, compute = (str(dtype).removeprefix("torch.") for dtype in (precision.parameter, precision.compute))
            yield stored if stored == compute else f"{stored}, computed in {compute}"

    def _describe_device(self) -> str:
        """Return device, processes, mesh sizes and hosts."""
        device = self.device.device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        sizes = [f"{name} {size}" for name, size in self.mesh.sizes.settings().items() if size > 1]
        processes = f"{self.mesh.world.size} process{'es' * (self.mesh.world.size > 1)}"
        if (hosts := max((launch.node_count for launch in self.launches.values()), default=1)) > 1:
            processes += f" on {hosts} hosts"
        words = [kind, f"{processes}: {' x '.join(sizes)}" if sizes else processes]
        return ", ".join([*words, *([self._describe_threads()] if device.type == "cpu" else [])])

    def _describe_threads(self) -> str:
        """Return the number of CPU threads."""
        return f"CPU threads{' of each' * (self.mesh.world.size > 1)}: {torch.get_num_threads()}"

    def _summary_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the summary as (subject, text): steps, tokens, speed, best loss and output files."""
        if self._last:
            seconds = self.clock() - self._began
            speed = f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
            steps = f"steps {self._first} to {self._last}"
            yield "trained", f"{steps} in {timedelta(seconds=round(seconds))}: {self._tokens:,} tokens, {speed} overall"
        for name, best in self._best.items():
            yield "best", f"{name.replace('_', ' ')} {best['value']:.4f} after step {best['step']}"
        folder = self.job.folder_path
        names = [path.name for path in folder.iterdir() if path.name not in HIDDEN_FILES] if folder.is_dir() else []
        yield "results", f"in {folder}: {', '.join(sorted(names))}"


def _describe_epoch(counter: EpochCounter) -> str:
    """Return the rows and steps in an epoch."""
    return f"{counter.rows_per_epoch:,} rows and {count_steps_of_epochs(1, counter):,} steps in an epoch"


def _format_validation_row_counts(validation: ValidationData) -> str:
    """Return how many validation rows are used."""
    used, count = validation.count_evaluated_and_total_rows()
    return f"validation: {used:,} of {count:,} rows"


def _describe_tokens_per_step(rows: PackedDataset, batching: Batching) -> str:
    """Return the tokens in a step, estimated from the fill rate if rows are padded."""
    fill = rows.fill_rate("train")
    size = f"in a step, in microbatches of {batching.micro_size:,} rows"
    if fill > MIN_FULL_RATE:
        return f"{batching.global_size * rows.length:,} {size}"
    tokens = round(fill * batching.global_size * rows.length)
    return f"about {tokens:,} {size} of {rows.length:,}, {100 * fill:.1f} % full"


def _list_architectures(model: Model) -> list[str]:
    """Return the Hugging Face architectures of a language model, or the model's class name."""
    if not isinstance(model, LanguageModel):
        return [type(model).__name__]
    return [str(name) for name in model.hugging_face_config().get("architectures", [])]


def _build_whole_model_on_meta(model: Model) -> nn.Module:
    """Build the whole model, without ranks, on the meta device."""
    with torch.device("meta"):
        return model.build(LayerRange(0, model.num_hidden_layers, embedding=True, head=True))
