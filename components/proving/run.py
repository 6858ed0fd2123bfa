"""
A proof's run on this rank, with a record.

The subject of a proof is a component in its smallest recipe, or a recipe with the smallest sizes.
"""

import inspect
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
from safetensors.torch import load_file

from drawloom import Recipe, RecipeError, UserError
from drawloom.components.checkpoint.commit import FOLDER as CHECKPOINTS
from drawloom.components.phases.report import Report
from drawloom.components.proving.recorder import ProofRecorder, RankRecord
from drawloom.components.proving.smallest import (
    BASE,
    REWARD,
    find_node_and_changes,
    make_component_recipe,
    make_reproducible_values,
    make_reward_values,
    merge_values,
    shrink_recipe,
)
from drawloom.graph.problems import ReportedError
from drawloom.graph.project import Project
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.graph.types.port_match import implements
from drawloom.ports import Reward, RunInfo

LISTENER, TRACKER = "prove_listener", "prove_tracker"
"""Nodes to replace by the recorder."""
EXPORTS = ("export", "adapter")

Values = Mapping[str, Any]
"""Values of a recipe, as nested dicts."""


@attrs.frozen
class ProofSource:
    """
    A recipe's name or path, with a command's overlays and imports, values over them, and words over these.
    """

    recipe: str
    values: Values = attrs.field(factory=dict)
    words: Sequence[str] = ()
    overlays: Sequence[str] = ()
    imports: Sequence[str] = ()

    def load(self, values: Values) -> Recipe:
        """Return the recipe with more values."""
        recipe = Recipe.load(self.recipe, overlays=self.overlays, imports=self.imports)
        for layer, name in ((self.values, "prove"), (read_overrides(self.words), "command line"), (values, "prove")):
            recipe = recipe.with_values(layer, name)
        return recipe

    def format_with(self, values: Values, comment: str) -> str:
        """Return a recipe file with more values, below a comment."""
        shipped = RecipeFolder(Project.from_package("drawloom").recipes).names
        bases = [name if name in shipped or name[:1] in "./" else f"./{name}" for name in (self.recipe, *self.overlays)]
        tables = merge_values(merge_values(self.values, read_overrides(self.words)), values)
        plain = {"extends": bases} | {name: value for name, value in tables.items() if not isinstance(value, dict)}
        lines = [f"# {line}" for line in comment.splitlines()]
        lines += [f"{name} = {dump_toml(value)}" for name, value in plain.items()]
        for name, table in tables.items():
            if isinstance(table, dict):
                lines += ["", f"[{dump_key(name)}]", *(f"{dump_key(key)} = {dump_toml(table[key])}" for key in table)]
        return "\n".join(lines) + "\n"


@attrs.frozen
class ProofRun:
    """
    A run to record: a recipe with values, in a folder, up to a step.

    It resumes from the `copied` checkpoint, if there is one. After the last step, it is killed if a file
    `killed_after` is named, as soon as this exists. `noise` and `seed` are the recorder's. `within` is a context around
    the whole run, for tests with faults.
    """

    source: ProofSource
    values: Values
    folder: Path
    last_step: int
    copied: Path | None = None
    killed_after: Path | None = None
    noise: float = 0.0
    seed: int = 0
    within: Callable[[], AbstractContextManager[object]] = nullcontext


class RefusedError(Exception):
    """The run was refused before its first step."""


def run_and_record(run: ProofRun) -> RankRecord:
    """Run a recipe on this rank, and return the record. Raises RefusedError if the run can't start."""
    recorder = ProofRecorder()
    with run.within():
        recipe = run.source.load(run.values)
        if run.copied is not None and os.environ.get("RANK", "0") == "0":
            shutil.copytree(run.copied, run.folder / CHECKPOINTS / run.copied.name)
        try:
            with _add_recorder(recipe, run.folder).open(
                replacements={LISTENER: recorder, TRACKER: recorder.tracker}, accept_changes=True
            ) as nodes:
                recorder.start(nodes, run.noise, run.seed)
                for step in nodes.steps():
                    if step.index == run.last_step and not step.is_last:
                        while run.killed_after:
                            if run.killed_after.exists():
                                os.kill(os.getpid(), signal.SIGKILL)
                            time.sleep(0.01)
                        break
        except (UserError, RecipeError, ReportedError) as error:
            if recorder.has_started:
                raise
            raise RefusedError(" ".join(str(error).split())) from error
    if recorder.error is not None:
        raise recorder.error
    if os.environ.get("RANK", "0") == "0":
        files = [file for folder in EXPORTS for file in sorted((run.folder / folder).glob("*.safetensors"))]
        recorder.record.exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return recorder.record


def _add_recorder(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe in another run folder, with nodes to replace by the recorder."""
    graph = recipe.graph
    reports = {name: {"trackers": [f"@{TRACKER}"]} for name in graph.nodes if graph.nodes[name].spec.cls is Report}
    return recipe.with_values(
        {
            LISTENER: {"use": "listeners.progress"},
            TRACKER: {"use": "trackers.jsonl"},
            recipe.project.root: {"listeners": [f"@{LISTENER}"]},
            **{name: {"folder": str(folder)} for name in graph.implementers(RunInfo)},
            **reports,
        },
        "prove",
    )


OWN = "drawloom.components"


@attrs.frozen
class Subject:
    """
    A component's or a recipe's name, with the words, overlays and imports of a command.

    `nodes` are a recipe's nodes with contracts to check; default: nodes with foreign components.
    """

    name: str
    words: Sequence[str] = ()
    overlays: Sequence[str] = ()
    imports: Sequence[str] = ()
    nodes: Sequence[str] = ()

    @classmethod
    def of_class(cls, component: type, words: Sequence[str]) -> "Subject":
        """Return the subject for a component class in a package, or in a file of its own."""
        module, file = component.__module__, inspect.getfile(component)
        if module.startswith(f"{OWN}."):
            return cls(module.removeprefix(f"{OWN}."), words)
        package = module.partition(".")[0]
        return cls(module, words, imports=[package if package != module else file])

    def make_source_values_and_nodes(self, folder: Path) -> tuple[ProofSource, dict[str, Any], list[str]]:
        """
        Return the recipe, values for all its runs, and the nodes with contracts to check.

        Files for the recipe are written into the folder. Raises UserError or RecipeError.
        """
        project = Project.from_package("drawloom").with_imports(self.imports)
        common: dict[str, Any] = {"words": self.words, "overlays": self.overlays, "imports": self.imports}
        shipped = RecipeFolder(project.recipes).names
        is_recipe = self.name in shipped or self.name.endswith(".toml") or Path(self.name).exists()
        if self.nodes and not is_recipe:
            raise UserError(f"--node needs a recipe, and {self.name} is a component; leave it out", 2)
        spec = None if is_recipe else project.registry.require(self.name)
        if spec is None or implements(spec.cls, Reward):
            source = ProofSource(self.name, **common)
            if spec is not None:
                source = ProofSource("grpo", make_reward_values(spec, folder), **common)
            recipe = source.load({})
            recipe.check(skip_machine_checks=True)
            graph = recipe.graph
            if unknown := [node for node in self.nodes if node not in graph.nodes]:
                raise UserError(f"--node {unknown[0]}: {self.name} has no such node", 2)
            others = [name for name, node in graph.nodes.items() if not node.spec.cls.__module__.startswith(OWN)]
            values = merge_values(shrink_recipe(recipe, folder), make_reproducible_values(graph))
            return source, values, list(self.nodes or others) if spec is None else [REWARD]
        reasons: list[str] = []
        if position := find_node_and_changes(spec):
            node, changes = position
            for heads in (2, 4):  # latent attention has as many key heads as heads
                source = ProofSource(BASE, make_component_recipe(spec, node, changes, folder, heads), **common)
                try:
                    source.load({}).check(skip_machine_checks=True)
                    return source, make_reproducible_values(source.load({}).graph), [node]
                except RecipeError as error:
                    reasons += [f"{problem.text}; {problem.hint}" for problem in error.problems]
        such = _list_shipped_recipes(project, self.name)
        raise UserError(
            f"{self.name} does not fit into the smallest recipe: {[*reasons, 'no port of it has a place there'][0]}. "
            "Prove a recipe with it" + (f", such as {' or '.join(such)}" if such else ""),
            2,
        )


def _list_shipped_recipes(project: Project, use: str) -> list[str]:
    """Return the shipped recipes that name a component, and overlays as options."""
    paths = RecipeFolder(project.recipes).paths
    named = [path for path in paths.values() if f'use = "{use}"' in path.read_text("utf-8")]
    return [f"--overlay {path.stem}" if path.parent.name == "overlays" else path.stem for path in named]
