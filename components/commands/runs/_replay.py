"""
Runs' records, their first difference, and replays that repeat a run's steps with hashes after every phase.

`python -m torch.distributed.run -m drawloom.components.commands.runs._replay` is a replay's rank.
"""

import copy
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import attrs

from drawloom import Recipe, UserError
from drawloom.components.checkpoint.commit import FOLDER as CHECKPOINTS
from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.phase_hashes import get_hashes_file_name
from drawloom.components.checkpoint.state_hashes import FOLDER as DIGESTS
from drawloom.components.commands._recipes import read_mesh_sizes
from drawloom.components.commands._trained import read_recipe_tables
from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process
from drawloom.components.report.metrics import METRICS, read_lines
from drawloom.components.storage.step_log import CHECKSUM
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.project import Project
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import Mesh, Stateful

TRACE = "trace_of_replay"
ERROR = "replay: "
"""Start of a process's last line on stderr if it fails."""
MACHINE_METRICS = {"tokens_per_second", "device_tokens_per_second", "tflops", "mfu", "memory", "seconds"}
"""Metrics of the machine, not of training, by their names or their part before a slash."""
UNCOMPARED = {CHECKSUM, "step", "format", *MACHINE_METRICS}

Nodes = dict[str, Any]
"""Tables of a resolved recipe, as tomllib reads them."""

Phase = tuple[int, str]
"""A step and a phase's name."""


@attrs.frozen
class PhaseDifference:
    """The first phase after which hashes differ, and the differing names in their order."""

    step: int
    phase: str
    names: list[str]


@attrs.frozen
class MetricsDifference:
    """The first step whose metrics differ, and the differing values in both records, empty without one."""

    step: int
    values: dict[str, tuple[str, str]]


@attrs.frozen
class RecordedSteps:
    """
    A run's metrics by step, without the machine's, and hashes of its state by step and phase.

    The hashes are in rank 0's order; names on other ranks begin with the rank. For a repeated step or phase, the newest
    line counts.
    """

    metrics: Mapping[int, Mapping[str, Any]]
    hashes: Mapping[Phase, Mapping[str, str]]

    @classmethod
    def read(
        cls, run: Path, hashes: str = get_hashes_file_name("{}"), skipped_nodes: Collection[str] = ()
    ) -> "RecordedSteps":
        """Read a run's record, with every rank's file `hashes`, without the state of `skipped_nodes`."""
        metrics = {
            row["step"]: {name: value for name, value in row.items() if name.partition("/")[0] not in UNCOMPARED}
            for row in read_json_rows(run / METRICS)
        }
        phases: dict[Phase, dict[str, str]] = {}
        for rank in range(len(list((run / DIGESTS).glob(hashes.format("*"))))):
            rows = read_json_rows(run / DIGESTS / hashes.format(rank))
            for phase, row in {(row["step"], row.get("phase", "")): row for row in rows}.items():
                phases.setdefault(phase, {}).update(
                    (f"rank {rank}: {name}" if rank else name, digest)
                    for name, digest in {**row.get("digests", {})}.items()
                    if name.partition("/")[0] not in skipped_nodes
                )
        return cls(metrics, phases)

    def find_different_metrics(self, other: "RecordedSteps", *, complete: bool = False) -> MetricsDifference | None:
        """Return the first difference; if both records should be `complete`, also for a step that one of them lacks."""
        for step in sorted(_list_compared_keys(self.metrics, other.metrics, complete)):
            one, theirs = self.metrics.get(step, {}), other.metrics.get(step, {})
            # repr: nan equals nan
            names = [name for name in {**one, **theirs} if repr(one.get(name)) != repr(theirs.get(name))]
            if names:
                return MetricsDifference(
                    step, {name: (str(one.get(name, "")), str(theirs.get(name, ""))) for name in names}
                )
        return None

    def find_different_phase(self, other: "RecordedSteps", *, complete: bool = False) -> PhaseDifference | None:
        """
        Return the first difference; if both records should be `complete`, also for a phase that one of them lacks.

        Names in only one of them are left out, unless nothing else differs there.
        """
        for step, phase in _list_compared_keys(self.hashes, other.hashes, complete):
            one, theirs = self.hashes.get((step, phase), {}), other.hashes.get((step, phase), {})
            names = [name for name in {**one, **theirs} if one.get(name) != theirs.get(name)]
            if names:
                return PhaseDifference(step, phase, [name for name in names if name in one and name in theirs] or names)
        return None


def _list_compared_keys(one: Mapping[Any, Any], other: Mapping[Any, Any], complete: bool) -> list[Any]:
    return [key for key in {**one, **other} if complete or (key in one and key in other)]


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects with a step in a file with JSON lines; no line that a kill left incomplete."""
    for line in b"".join(read_lines(path)).split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row


@attrs.frozen
class RecordedRun:
    """A run folder, its recipe's tables, and its record."""

    folder: Path
    nodes: Nodes
    record: RecordedSteps

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Read a run folder. Raises UserError if it has no recipe."""
        path = folder / LOCK
        if not path.exists():
            raise UserError(f"{folder} is not a run folder with a recipe; give one, such as runs/first_run", 2)
        return cls(folder, read_recipe_tables(path), RecordedSteps.read(folder))

    def find_checkpoints_before(self, step: int) -> dict[int, Path]:
        """Return the checkpoints before a step, by step."""
        paths = list_checkpoints(self.folder / CHECKPOINTS)
        return {own: path for path in paths if (own := step_of_checkpoint(path)) < step}

    def count_ranks(self, project: Project) -> int:
        """Return the number of ranks: the mesh's, or with an "auto" dimension the number of logs."""
        graph = Recipe.of(self.nodes, "replay", project=project).graph
        settings = [node.settings for name, node in graph.nodes.items() if name in graph.implementers(Mesh)]
        if any(value == "auto" for table in settings for value in table.values()):
            return max(1, len(list((self.folder / "log").glob("rank-*.log"))))
        return math.prod(read_mesh_sizes(graph).without_expert_dimensions().values())


@attrs.frozen
class Replayer:
    """
    Replayer for runs, in this process or in one process per rank; temporary run folders are made in `folder`.

    Other processes import the packages, folders or files `imports`.
    """

    project: Project
    folder: Path
    imports: Sequence[str] = ()

    def replay(self, run: RecordedRun, checkpoint: Path | None, last_step: int) -> RecordedSteps:
        """
        Repeat a run from a checkpoint, or from the start, to a step, and return the record.

        Raises UserError if the recipe can't run here.
        """
        target = self.folder / "run"
        shutil.rmtree(target, ignore_errors=True)  # of the replay before
        if checkpoint is not None:
            shutil.copytree(checkpoint, target / CHECKPOINTS / checkpoint.name)
        recipe = self._make_replay_recipe(run.nodes, target)
        recipe.check()
        if (ranks := run.count_ranks(self.project)) == 1:
            with redirect_stdout(io.StringIO()):
                train_until_step(recipe, last_step)
        else:
            self._replay_in_processes(recipe, last_step, ranks)
        record = RecordedSteps.read(target)
        if not record.hashes:
            raise UserError("the replay has no hashes; its log shows why the listener checkpoint.phase_hashes failed")
        return record

    def _make_replay_recipe(self, nodes: Nodes, target: Path) -> Recipe:
        """Return the recipe with the run folder `target`, listeners with state alone, and a listener for hashes."""
        root = self.project.root
        data = copy.deepcopy(nodes)
        if not {"run", root} <= data.keys():
            raise UserError(f"the recipe has no nodes [run] and [{root}] to replay", 2)
        data["run"]["folder"] = str(target)
        stateful = Recipe.of(data, "replay", project=self.project).graph.implementers(Stateful)
        listeners = [name for name in data[root].get("listeners", ()) if name.removeprefix("@") in stateful]
        data[root]["listeners"] = [*listeners, f"@{TRACE}"]
        data[TRACE] = {"use": "checkpoint.phase_hashes"}
        return Recipe.of(data, "replay", project=self.project)

    def _replay_in_processes(self, recipe: Recipe, last_step: int, ranks: int) -> None:
        """Repeat a run in one process per rank. Raises UserError with the end of their output if one fails."""
        path = self.folder / "replay.toml"
        path.write_text(recipe.to_resolved_toml(), "utf-8")
        command = [*make_rank_command(ranks, __name__), str(path), str(last_step), *self.imports]
        threads = {THREADS: str(count_threads_per_process(ranks))}
        done = subprocess.run(
            command, env={**threads, **os.environ}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith(ERROR)] or [done.stderr]
            raise UserError(f"the replay on {ranks} ranks failed: {lines[-1].removeprefix(ERROR)}")


def make_rank_command(ranks: int, module: str) -> list[str]:
    """Return the start of a command that runs a module in this many processes."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return [sys.executable, "-m", *(launcher if ranks > 1 else []), module]


def train_until_step(recipe: Recipe, last_step: int) -> None:
    """Train a recipe in this process to a step, from its run folder's checkpoint or the start."""
    with recipe.open(accept_changes=True) as run:
        for step in run.steps():
            if step.index >= last_step:
                break


def main(path: str, last_step: str, *imports: str) -> int:
    """Replay the recipe in a file to a step, with imported packages, folders or files; return the exit code."""
    try:
        train_until_step(Recipe.load(Path(path), imports=imports), int(last_step))
    except Exception as error:  # the parent process reports it
        print_escaped_text(f"{ERROR}{type(error).__name__}: {' '.join(str(error).split())}", "stderr")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
