"""
repeat a step of a run from its checkpoint, and report which results differ from the recorded ones

A difference shows silent data corruption, then or now, or another environment: libraries, device, kernels. A second
replay tells whether this machine computes the step twice alike.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from drawloom.components.commands._replay import RecordedRun, Replayer
from drawloom.graph import UserError
from drawloom.graph.cli.command import Command, Count, argument, command, option
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project


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


@command("runs")
class VerifyStepCommand(Command):
    """A replay from the newest checkpoint before a step, with every replayed step compared with the record."""

    run_folder: Path = argument("a run folder, such as runs/first_run")
    step: Count = option("the step to verify, from 1")

    def run(self, project: Project) -> VerifyStepResult:
        run, step = RecordedRun.read(self.run_folder), self.step
        recorded = run.record
        if step not in recorded.metrics:
            last = f"the last one is step {max(recorded.metrics)}" if recorded.metrics else "there is none"
            raise UserError(f"--step {step}: {self.run_folder} has no record of this step; {last}", 2)
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
