"""Opens the model of a run folder with the weights of its newest checkpoint, for read-only commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.components.checkpoint.manifest import step_of
from drawloom.components.checkpoint.reader import load_node, newest
from drawloom.components.ports.model import Stages
from drawloom.components.ports.run import FILES
from drawloom.graph import UserError
from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.project import Project
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.recipe import Recipe


@attrs.frozen
class Trained:
    """The open components of a run, by port, and the step of its newest checkpoint."""

    step: int
    _objects: dict[type, Any]

    def __getitem__(self, port: type) -> Any:
        return self._objects[port]


@contextmanager
def trained(project: Project, folder: Path, *ports: type) -> Iterator[Trained]:
    """
    A run's newest weights, in this process alone: what implements these ports, and nothing that they do not need.

    The run is only read, and may continue meanwhile.
    """
    step, graph, names, weights = _read(project, folder, (Stages, *ports))
    with project.container(graph, *names.values()) as objects:
        objects[names[Stages]].load_state_dict(weights)
        del weights
        yield Trained(step, {port: objects[name] for port, name in names.items()})


def _read(project: Project, folder: Path, ports: Sequence[type]) -> tuple[int, Graph, dict[type, str], dict[str, Any]]:
    """The newest checkpoint's step and graph, the names of the nodes by port, and the state of its stages."""
    while (checkpoint := newest(folder)) is not None:
        try:
            graph = _graph(project, checkpoint / LOCK, folder / FILES)
            names = {port: _only(graph, port, checkpoint) for port in ports}
            graph = graph.restricted_to(names.values())
            return step_of(checkpoint), graph, names, load_node(checkpoint, names[Stages])
        except (UserError, OSError):
            if checkpoint.exists():
                raise
            # The run has removed it since: there is a newer one.
    raise UserError(f"{folder} holds no finished checkpoint; give the folder of a run, such as runs/first_run", 2)


def _graph(project: Project, lock: Path, files: Path) -> Graph:
    """The graph of a run for a single process; files that it read are read from their copies in the run folder."""
    data: dict[str, Any] = tomli.loads(lock.read_text("utf-8"))
    for name, node in data.items():
        if isinstance(node, dict) and node.get("use") == "pipeline.stages":
            _initial_weights(data, node)
        if isinstance(node, dict) and node.get("use") == "distributed.mesh":
            data[name] = {
                "use": "distributed.mesh",
                "processes": node["processes"],
            }  # a single process holds the whole model
        if isinstance(node, dict) and str(node.get("use")).startswith("pipeline.schedules."):
            data[name] = {"use": "pipeline.schedules.one_f_one_b"}  # others may need more than one rank
    for copies in files.glob("*/*"):
        _use_copies(data, copies)
    return project.graph(Recipe.of(data, str(lock)), root="")


def _initial_weights(data: dict[str, Any], stages: dict[str, Any]) -> None:
    """Have stages load the weights that they started from only if a checkpoint does not hold all of them."""
    model = data.get(str(stages.get("model")).removeprefix("@"), {})
    if model.get("use") == "model.auto":
        if model.get("weights", True):
            stages.setdefault("weights", model["path"])  # the run folder has copies of the other files alone
        model["weights"] = False
    if not stages.get("adapters"):
        stages.pop("weights", None)  # the initial weights are not needed, and may be gone


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
