"""The model of a run folder, with the weights of its newest checkpoint, for commands that only look."""

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
    """The parts of a run that commands use, open."""

    model: Model
    stages: Stages
    tokenizer: Tokenizer
    predictor: Predictor
    mesh: Mesh


@contextmanager
def trained(project: Project, folder: Path) -> Iterator[Trained]:
    """A run's newest weights, whole in this process. The run itself is not touched, and may go on meanwhile."""
    checkpoint = newest(folder)
    if checkpoint is None:
        raise UserError(f"{folder} holds no finished checkpoint; give the folder of a run, such as runs/first_run", 2)
    graph = _graph(project, checkpoint / LOCK)
    ports = {"model": Model, "stages": Stages, "tokenizer": Tokenizer, "predictor": Predictor, "mesh": Mesh}
    names = {name: _only(graph, port, checkpoint) for name, port in ports.items()}
    with project.container(graph, *names.values()) as objects:
        objects[names["stages"]].load_state_dict(load_node(checkpoint, names["stages"]))
        yield Trained(**{field: objects[name] for field, name in names.items()})


def _graph(project: Project, lock: Path) -> Graph:
    data: dict[str, Any] = tomli.loads(lock.read_text("utf-8"))
    for name, node in data.items():
        if isinstance(node, dict) and node.get("use") == "pipeline.stages":
            node.pop("weights", None)  # what the run started from may be gone, and is not needed
        if isinstance(node, dict) and node.get("use") == "distributed.mesh":
            data[name] = {"use": "distributed.mesh", "processes": node["processes"]}  # one process holds all
        if isinstance(node, dict) and str(node.get("use")).startswith("pipeline.schedules."):
            data[name] = {"use": "pipeline.schedules.one_f_one_b"}
    return project.graph(Recipe.of(data, str(lock)), root="").or_error()


def _only(graph: Graph, port: type, checkpoint: Path) -> str:
    names = graph.implementers(port)
    if len(names) != 1:
        raise UserError(f"{checkpoint} has {len(names)} nodes that are a {port.__name__}; it takes one", 2)
    return names[0]
