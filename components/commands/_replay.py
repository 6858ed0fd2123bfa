"""Replays of a run's steps with hashes after every phase, and the first difference between two replays."""

import copy
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.components.checkpoint.manifest import FOLDER as CHECKPOINTS
from drawloom.components.checkpoint.manifest import list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.phase_hashes import INITIAL, get_hashes_file_name
from drawloom.components.checkpoint.state_hashes import FOLDER as DIGESTS
from drawloom.components.commands._recipes import read_mesh_sizes
from drawloom.components.commands.verify_resume import MACHINE_METRICS
from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process
from drawloom.components.ports.checkpoint import Stateful
from drawloom.components.ports.distributed import Mesh
from drawloom.components.report.metrics import METRICS, read_lines
from drawloom.components.storage.step_log import CHECKSUM
from drawloom.graph import UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.lockfile import LOCK

TRACE = "trace_of_why"
PROCESS = "drawloom.components.commands._replay_process"
ERROR = "replay: "
"""Start of a process's last line on stderr if it fails."""

Nodes = dict[str, Any]
"""Tables of a resolved recipe, as tomllib reads them."""


@attrs.frozen
class PhaseDigests:
    """Hashes of a run's state after a phase, by name."""

    step: int
    phase: str
    digests: Mapping[str, str]


@attrs.frozen
class TraceDifference:
    """First phase whose two traces differ, and the differing names, in the order of the hashes."""

    step: int
    phase: str
    names: Sequence[str]


def read_recipe_nodes(run: Path) -> Nodes:
    """Return a run's recipe. Raises UserError if the folder has none."""
    path = run / LOCK
    try:
        return tomli.loads(b"".join(read_lines(path)).decode("utf-8")) if path.exists() else _raise_missing_recipe(run)
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}; give another run folder", 2) from error


def _raise_missing_recipe(run: Path) -> Nodes:
    """Raise the UserError for a folder without a recipe."""
    raise UserError(f"{run} is not a run folder with a recipe; give one, such as runs/first_run", 2)


def read_recorded_hashes(run: Path) -> list[PhaseDigests]:
    """
    Return a run's recorded hashes in the order of rank 0's steps and phases; for a repeated phase, the newest.

    Names on other ranks begin with the rank.
    """
    rows: dict[tuple[int, str], dict[str, str]] = {}
    ranks = len(list((run / DIGESTS).glob(get_hashes_file_name("*"))))
    for rank in range(ranks):
        own: dict[tuple[int, str], dict[str, str]] = {}
        for line in read_lines(run / DIGESTS / get_hashes_file_name(rank)):
            try:
                row = json.loads(line)
                own[row["step"], row["phase"]] = {**row["digests"]}
            except (ValueError, KeyError, TypeError):  # a kill left the line incomplete
                continue
        for key, digests in own.items():
            names = {f"rank {rank}: {name}" if rank else name: digest for name, digest in digests.items()}
            rows.setdefault(key, {}).update(names)
    return [PhaseDigests(step, phase, digests) for (step, phase), digests in rows.items()]


def count_ranks(run: Path, nodes: Nodes, project: Project) -> int:
    """Return the number of ranks for a recipe: its mesh's, or with an "auto" dimension the number of logs in a run."""
    graph = Recipe.of(nodes, "replay", project=project).graph
    settings = [node.settings for name, node in graph.nodes.items() if name in graph.implementers(Mesh)]
    if any(value == "auto" for table in settings for value in table.values()):
        return max(1, len(list((run / "log").glob("rank-*.log"))))
    return math.prod(read_mesh_sizes(graph).without_expert_dimensions().values())


def find_differing_metrics(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics with different values in two rows."""
    return [name for name in {**one, **other} if repr(one.get(name)) != repr(other.get(name))]  # repr: nan equals nan


def read_comparable_metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Return a run's metrics by step, without machine metrics, such as speeds."""
    rows: dict[int, dict[str, Any]] = {}
    for line in read_lines(run / METRICS):
        try:
            row = json.loads(line)
        except ValueError:  # a kill left the line incomplete
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            values = {key: value for key, value in row.items() if key not in (CHECKSUM, "step", "format")}
            rows[row["step"]] = {key: v for key, v in values.items() if key.partition("/")[0] not in MACHINE_METRICS}
    return rows


def find_first_difference(one: Sequence[PhaseDigests], other: Sequence[PhaseDigests]) -> TraceDifference | None:
    """
    Return the first phase in both traces with different hashes, or None.

    Names in only one of them are left out, unless nothing else differs there.
    """
    known = {(entry.step, entry.phase): entry.digests for entry in other}
    for entry in one:
        theirs = known.get((entry.step, entry.phase))
        if theirs is None or theirs == entry.digests:
            continue
        common = [name for name, digest in entry.digests.items() if theirs.get(name, digest) != digest]
        names = common or [name for name in {**entry.digests, **theirs} if entry.digests.get(name) != theirs.get(name)]
        return TraceDifference(entry.step, entry.phase, names)
    return None


@attrs.frozen
class Replayer:
    """
    Replayer for runs, in this process or in one process per rank; temporary run folders are made in `folder`.

    Other processes import the packages, folders or files `imports`.
    """

    project: Project
    folder: Path
    imports: Sequence[str] = ()
    _count: list[int] = attrs.field(init=False, factory=lambda: [0])

    def replay_and_read_hashes(
        self, nodes: Nodes, checkpoint: Path | None, last_step: int, ranks: int = 1
    ) -> list[PhaseDigests]:
        """Repeat a run from a checkpoint, or from the start, to a step, and return the hashes."""
        with self.replay_into_temporary_folder(nodes, checkpoint, last_step, ranks) as folder:
            return read_recorded_hashes(folder)

    @contextmanager
    def replay_into_temporary_folder(
        self, nodes: Nodes, checkpoint: Path | None, last_step: int, ranks: int = 1
    ) -> Iterator[Path]:
        """
        Repeat a run from a checkpoint, or from the start, to a step, and yield its folder, removed afterwards.

        Raises UserError if the recipe can't run here.
        """
        self._count[0] += 1
        target = self.folder / str(self._count[0])
        if checkpoint is not None:
            shutil.copytree(checkpoint, target / CHECKPOINTS / checkpoint.name)
        recipe = self._make_replay_recipe(nodes, target)
        recipe.check()
        if ranks == 1:
            with redirect_stdout(io.StringIO()):
                train_until_step(recipe, last_step)
        else:
            self._replay_in_processes(recipe, last_step, ranks)
        if not read_recorded_hashes(target):
            raise UserError("the replay has no hashes; its log shows why the listener checkpoint.phase_hashes failed")
        yield target
        shutil.rmtree(target)

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
        path = self.folder / f"{self._count[0]}.toml"
        path.write_text(recipe.to_resolved_toml(), "utf-8")
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", PROCESS]
        command = [sys.executable, "-m", *launcher, str(path), str(last_step), *self.imports]
        threads = {THREADS: str(count_threads_per_process(ranks))}
        done = subprocess.run(
            command, env={**threads, **os.environ}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith(ERROR)] or [done.stderr]
            raise UserError(f"the replay on {ranks} ranks failed: {lines[-1].removeprefix(ERROR)}")


def train_until_step(recipe: Recipe, last_step: int) -> None:
    """Train a recipe in this process to a step, from its run folder's checkpoint or the start."""
    with recipe.open(accept_changes=True) as run:
        for step in run.steps():
            if step.index >= last_step:
                break


def list_common_checkpoints(one: Path, other: Path, before_step: int) -> list[tuple[Path, Path]]:
    """Return the checkpoints of both runs at equal steps before a step, the newest first."""
    checkpoints = [
        {step_of_checkpoint(path): path for path in list_checkpoints(run / CHECKPOINTS)} for run in (one, other)
    ]
    steps = sorted((step for step in checkpoints[0].keys() & checkpoints[1].keys() if step < before_step), reverse=True)
    return [(checkpoints[0][step], checkpoints[1][step]) for step in steps]


def initial_states_differ(one: Sequence[PhaseDigests], other: Sequence[PhaseDigests]) -> bool:
    """Return whether the initial states differ, before the first phase."""
    difference = find_first_difference(one[:1], other[:1])
    return difference is not None and difference.phase == INITIAL


def apply_single_edits(nodes: Nodes, keys: Sequence[str], others: Nodes) -> Iterator[tuple[str, Nodes]]:
    """
    Yield copies of `nodes` with one edit, and the edit's key: a value from `others`, or a node's whole table.

    Nodes that only the other recipe has are there, too, since a value may refer to them.
    """
    nodes = {**{name: table for name, table in others.items() if name not in nodes}, **nodes}
    for node in dict.fromkeys(key.rpartition(".")[0] for key in keys):
        mine, theirs = find_node_table(nodes, node), find_node_table(others, node)
        own = [key for key in keys if key.rpartition(".")[0] == node]
        if mine is None or theirs is None or mine.get("use") != theirs.get("use"):
            yield node, replace_node_table(nodes, node, theirs)
            continue
        for key in own:
            name = key.rpartition(".")[2]
            table = {**mine, name: theirs[name]} if name in theirs else {k: v for k, v in mine.items() if k != name}
            yield key, replace_node_table(nodes, node, table)


def find_node_table(nodes: Nodes, node: str) -> Nodes | None:
    """Return the table of a node, whose name may contain groups, or None."""
    part: Any = nodes
    for name in node.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else None


def replace_node_table(nodes: Nodes, node: str, table: Nodes | None) -> Nodes:
    """Return a recipe's copy with this table for a node, or without the node if the table is None."""
    data = copy.deepcopy(nodes)
    *groups, last = node.split(".")
    part = data
    for name in groups:
        part = part.setdefault(name, {})
    if table is None:
        part.pop(last, None)
    else:
        part[last] = copy.deepcopy(table)
    return data
