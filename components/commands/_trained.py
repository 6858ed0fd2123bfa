"""Opens the model of a run folder with the weights of its newest checkpoint, for read-only commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.components.checkpoint.reader import load_node, newest
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import Model, Stages
from drawloom.components.ports.pipeline import Predictor
from drawloom.graph import UserError
from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.project import Project
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.recipe import Recipe


@attrs.frozen
class Trained:
    """The open components of a run that commands use."""

    model: Model
    stages: Stages
    tokenizer: Tokenizer
    predictor: Predictor
    mesh: Mesh


@contextmanager
def trained(project: Project, folder: Path) -> Iterator[Trained]:
    """A run's newest weights, in this process alone. The run is only read, and may continue meanwhile."""
    graph, names, weights = _read(project, folder)
    with project.container(graph, *names.values()) as objects:
        objects[names["stages"]].load_state_dict(weights)
        del weights
        yield Trained(**{field: objects[name] for field, name in names.items()})


def _read(project: Project, folder: Path) -> tuple[Graph, dict[str, str], dict[str, Any]]:
    """The graph of the newest checkpoint, the names of the nodes of a Trained by field, and the state of its stages."""
    ports = {"model": Model, "stages": Stages, "tokenizer": Tokenizer, "predictor": Predictor, "mesh": Mesh}
    while (checkpoint := newest(folder)) is not None:
        try:
            graph = _graph(project, checkpoint / LOCK)
            names = {name: _only(graph, port, checkpoint) for name, port in ports.items()}
            return graph, names, load_node(checkpoint, names["stages"])
        except (UserError, OSError):
            if checkpoint.exists():
                raise
            # The run has removed it since: there is a newer one.
    raise UserError(f"{folder} holds no finished checkpoint; give the folder of a run, such as runs/first_run", 2)


def _graph(project: Project, lock: Path) -> Graph:
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
    return project.graph(Recipe.of(data, str(lock)), root="").or_error()


def _only(graph: Graph, port: type, checkpoint: Path) -> str:
    names = graph.implementers(port)
    if len(names) != 1:
        raise UserError(f"{checkpoint} has {len(names)} nodes that are a {port.__name__}; one is required", 2)
    return names[0]
