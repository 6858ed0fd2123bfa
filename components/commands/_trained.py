"""Opens the model of a run folder with the weights of its newest checkpoint, for read-only commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli

from drawloom.components.checkpoint.manifest import step_of
from drawloom.components.checkpoint.reader import load_node, newest
from drawloom.components.ports.model import Stages
from drawloom.components.ports.run import FILES
from drawloom.graph import UserError
from drawloom.graph.build.graph import Graph
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.runtime.container import Container


@contextmanager
def trained(project: Project, folder: Path, *ports: type) -> Iterator[tuple[Container, int]]:
    """
    A run's newest weights, in this process alone, and their step: what implements these ports, and what these need.

    The run is only read, and may continue meanwhile.
    """
    step, recipe, names, weights = _read(project, folder, (Stages, *ports))
    with recipe.open(names) as run:
        run[names[0]].load_state_dict(weights)
        del weights
        yield run, step


def _read(project: Project, folder: Path, ports: Sequence[type]) -> tuple[int, Recipe, list[str], dict[str, Any]]:
    """The newest checkpoint's step and recipe, the names of the nodes of the ports, and the state of the first."""
    while (checkpoint := newest(folder)) is not None:
        try:
            recipe = _recipe(project, checkpoint / LOCK, folder / FILES)
            names = [_only(recipe.graph, port, checkpoint) for port in ports]
            return step_of(checkpoint), recipe, names, load_node(checkpoint, names[0])
        except (UserError, OSError):
            if checkpoint.exists():
                raise
            # The run has removed it since: there is a newer one.
    raise UserError(f"{folder} holds no finished checkpoint; give the folder of a run, such as runs/first_run", 2)


def _recipe(project: Project, lock: Path, files: Path) -> Recipe:
    """The recipe of a run for a single process; files that it read are read from their copies in the run folder."""
    data: dict[str, Any] = tomli.loads(lock.read_text("utf-8"))
    for name, node in data.items():
        if isinstance(node, dict) and node.get("use") == "pipeline.stages":
            node.pop("weights", None)  # the initial weights are not needed, and may be gone
        if isinstance(node, dict) and node.get("use") == "distributed.mesh":
            data[name] = {
                "use": "distributed.mesh",
                "processes": node["processes"],
            }  # a single process holds the whole model
        if isinstance(node, dict) and str(node.get("use")).startswith("pipeline.schedules."):
            data[name] = {"use": "pipeline.schedules.one_f_one_b"}  # others may need more than one rank
    for copies in files.glob("*/*"):
        _use_copies(data, copies)
    return Recipe.of(data, str(lock), project=project)


def _use_copies(data: dict[str, Any], copies: Path) -> None:
    """Have a setting of a node name the copy of its file, or the folder of copies if it named a folder."""
    node: Any = data
    for part in copies.parent.name.split("."):  # a member of a group is a table in the group's table
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(named := node.get(copies.name), str):
        copy = copies / Path(named).name
        node[copies.name] = str(copy if copy.is_file() else copies)


def _only(graph: Graph, port: type, checkpoint: Path) -> str:
    names = graph.implementers(port)
    if not names:
        graph.or_error()  # such a node may have a problem, such as an unknown component
    if len(names) != 1:
        raise UserError(f"{checkpoint} has {len(names)} nodes that are a {port.__name__}; one is required", 2)
    return names[0]
