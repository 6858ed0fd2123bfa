"""verify the checksums of a run's checkpoints or of a token store, or repeat a step of a run

With --step, a step is repeated from the newest checkpoint before it, and every repeated step is compared with the
record. A difference shows silent data corruption, then or now, or another environment: libraries, device, kernels. A
second replay tells whether this machine computes the step twice alike.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drawloom.components.checkpoint.commit import FOLDER, CorruptCheckpointError, list_checkpoints
from drawloom.components.checkpoint.reader import verify_checkpoint
from drawloom.components.commands._trained import missing_checkpoint_error
from drawloom.components.commands.runs._replay import RecordedRun, Replayer
from drawloom.components.data.store.store import Store
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    Command,
    Count,
    Project,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)


@output_class
class CheckpointVerdict:
    """A checkpoint, and whether its files have the checksums of its manifest."""

    path: Path = output("folder of the checkpoint")
    fault: str = output("the first damaged file; empty if the checkpoint is valid")
    files: int = output("number of files; 0 for a damaged checkpoint")
    bytes: int = output("size of all files; 0 for a damaged checkpoint")

    def __str__(self) -> str:
        if self.fault:
            return f"{self.path}: corrupt: {self.fault}"
        return f"{self.path}: valid, {self.files} files, {format_decimal_byte_size(self.bytes)}"


@output_class
class VerifyResult(Result):
    """Checkpoints of a run, oldest first."""

    checkpoints: Sequence[CheckpointVerdict] = output("checkpoints, oldest first")

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint is corrupt."""
        return FAILED if any(checkpoint.fault for checkpoint in self.checkpoints) else OK

    def render(self, format: str) -> str:
        """Return one line per checkpoint."""
        return "\n".join(map(str, self.checkpoints))


@output_class
class StoreVerdict(Result):
    """A token store, and its files with a change."""

    folder: Path = output("token store")
    faults: Sequence[str] = output("one sentence per changed file")
    shards: int = output("number of shards")
    tokens: int = output("number of tokens")

    @property
    def exit_code(self) -> int:
        """1 if a file has changed."""
        return FAILED if self.faults else OK

    def render(self, format: str) -> str:
        """Return the faults, or the number of tokens."""
        whole = f"{self.folder}: {self.shards} shards, {self.tokens:,} tokens, all as they were written"
        return "\n".join(self.faults or [whole])


@output_class
class MetricDifference:
    """A metric with another value in the replay."""

    name: str = output("name of the metric")
    recorded: str = output("value recorded by the run; empty without it")
    replayed: str = output("value in the replay; empty without it")


@output_class
class VerifyStepResult(Result):
    """A replayed step compared with the record."""

    step: int = output("verified step")
    start: int = output("step of the checkpoint from which it was replayed; 0 for the start of the run")
    different_step: int | None = output(
        "first step that differs, from start + 1 to the verified one; null if none does"
    )
    phase: str = output("phase after which recorded hashes differ first; empty without recorded hashes")
    tensors: Sequence[str] = output("tensors whose recorded hashes differ there")
    metrics: Sequence[MetricDifference] = output("recorded metrics that differ in that step")
    compared: int = output("number of recorded values compared: metrics, and hashes of tensors")
    deterministic: bool | None = output("whether a second replay equals the first; null if nothing differs")

    @property
    def exit_code(self) -> int:
        """1 if something differs."""
        return OK if self.different_step is None else FAILED

    def render(self, format: str) -> str:
        """Return the verdict, and what differs."""
        origin = f"the checkpoint after step {self.start}" if self.start else "the start of the run"
        if self.different_step is None:
            return f"step {self.step} is as recorded: {self.compared} values are equal, replayed from {origin}"
        where = f", after [{self.phase}]: {', '.join(self.tensors)}" if self.phase else ""
        lines = [f"step {self.different_step} differs from the record, replayed from {origin}{where}"]
        lines += [f"  {metric.name}: {metric.recorded} -> {metric.replayed}" for metric in self.metrics]
        if self.deterministic:
            text = "a second replay equals the first: the recorded step was corrupted, or has another environment"
        else:
            text = "a second replay differs from the first: this machine does not compute the step twice alike"
        return "\n".join([*lines, text])


@command
class VerifyCommand(Command):
    """A verification for every file, or for a step; the run may continue meanwhile."""

    folder: Path = argument("a run folder, such as runs/first_run, or a token store", metavar="RUN_FOLDER|STORE")
    step: Count | None = option("repeat the run's steps up to this one, and compare them with the record")

    def run(self, project: Project) -> VerifyResult | StoreVerdict | VerifyStepResult:
        if self.step is not None:
            return self._repeat_and_compare(project, self.step)
        if (self.folder / "store.json").is_file():
            store = Store.open_unchecked(self.folder)
            return StoreVerdict(self.folder, store.find_faults(), len(store.shards), store.token_count)
        checkpoints = list_checkpoints(self.folder / FOLDER)
        if not checkpoints:
            raise missing_checkpoint_error(self.folder)
        return VerifyResult([verdict for path in checkpoints if (verdict := _make_checkpoint_verdict(path))])

    def _repeat_and_compare(self, project: Project, step: int) -> VerifyStepResult:
        """Repeat a step from the newest checkpoint before it. Raises UserError without a record of the step."""
        run = RecordedRun.read(self.folder)
        recorded = run.record
        if step not in recorded.metrics:
            last = f"the last one is step {max(recorded.metrics)}" if recorded.metrics else "there is none"
            raise UserError(f"--step {step}: {self.folder} has no record of this step; {last}", 2)
        earlier = run.find_checkpoints_before(step)
        start = max(earlier, default=0)
        with tempfile.TemporaryDirectory(prefix="verify-step-") as folder:
            replayer = Replayer(project, Path(folder), self.imports)
            replayed = replayer.replay(run, earlier.get(start), step)
            metrics, phase = recorded.find_different_metrics(replayed), recorded.find_different_phase(replayed)
            first = min([difference.step for difference in (metrics, phase) if difference], default=None)
            again = None if first is None else replayer.replay(run, earlier.get(start), step)
        phase = phase if phase and phase.step == first else None
        metrics = metrics if metrics and metrics.step == first else None
        return VerifyStepResult(
            step=step,
            start=start,
            different_step=first,
            phase=phase.phase if phase else "",
            tensors=phase.names if phase else [],
            metrics=[MetricDifference(name, one, other) for name, (one, other) in metrics.values.items()]
            if metrics
            else [],
            compared=sum(len(recorded.metrics[index]) for index in replayed.metrics.keys() & recorded.metrics.keys())
            + sum(len(recorded.hashes[index]) for index in replayed.hashes.keys() & recorded.hashes.keys()),
            deterministic=None if again is None else replayed.find_different_phase(again) is None,
        )


def _make_checkpoint_verdict(checkpoint: Path) -> CheckpointVerdict | None:
    """Compare a checkpoint's files with its manifest; return None if the run has meanwhile removed it."""
    try:
        manifest = verify_checkpoint(checkpoint)
    except CorruptCheckpointError as error:
        return CheckpointVerdict(checkpoint, str(error), 0, 0) if os.path.lexists(checkpoint) else None
    return CheckpointVerdict(checkpoint, "", len(manifest.files), manifest.total_file_bytes)
