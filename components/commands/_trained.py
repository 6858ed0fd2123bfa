"""The model of a run folder, with the weights of its newest checkpoint, for commands that only look."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli
from drawloom.components.checkpoint.reading import load_node, newest

from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.model import Model, Stages
from drawloom.graph import UserError
from drawloom.graph.graph import Graph
from drawloom.graph.recipe import Recipe
from drawloom.graph.workshop import Workshop


@contextmanager
def trained(workshop: Workshop, folder: Path) -> Iterator[tuple[Model, Stages, Tokenizer]]:
    """The model, its stages and its tokenizer, open. The run itself is not touched, and may go on meanwhile."""
    checkpoint = newest(folder)
    if checkpoint is None:
        raise UserError(f"{folder} holds no finished checkpoint; give the folder of a run, such as runs/first_run", 2)
    graph = _graph(workshop, checkpoint / "recipe.lock.toml")
    model, stages, tokenizer = (_only(graph, port, checkpoint) for port in (Model, Stages, Tokenizer))
    with workshop.container(graph, model, stages, tokenizer) as objects:
        objects[stages].load_state_dict(load_node(checkpoint, stages))
        yield objects[model], objects[stages], objects[tokenizer]


def _graph(workshop: Workshop, lock: Path) -> Graph:
    data: dict[str, Any] = tomli.loads(lock.read_text("utf-8"))
    for node in data.values():
        if isinstance(node, dict) and node.get("use") == "pipeline.stages":
            node.pop("weights", None)  # what the run started from may be gone, and is not needed
    return workshop.graph(Recipe.of(data, str(lock)), root="").or_error()


def _only(graph: Graph, port: type, checkpoint: Path) -> str:
    names = graph.fitting(port)
    if len(names) != 1:
        raise UserError(f"{checkpoint} has {len(names)} nodes that are a {port.__name__}; it takes one", 2)
    return names[0]
