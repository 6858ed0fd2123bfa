"""A listener for comparing a run with its plan, on a simulated GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import torch

from drawloom import Recipe
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning import check
from drawloom.components.planning.check import PlanCheck
from drawloom.components.ports.distributed import Processes
from drawloom.components.ports.run import RunFolder
from drawloom.graph import ResolvedRecipe
from drawloom.graph.testing import fake
from support.doubles import Machine

RECIPE = Recipe.load(
    "first_run", "model.num_hidden_layers=1", "vars.length=32", "batch.global_size=4", "batch.micro_size=2"
)


@contextmanager
def on_a_gpu(memory: int) -> Iterator[None]:
    """Pretend that the machine has a GPU with this many bytes, as fast as a CPU core."""
    device = attrs.evolve(find_device_model("cpu"), memory=memory)
    properties = SimpleNamespace(total_memory=memory)
    with (
        mock.patch.object(check, "load_local_device_model", return_value=device),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        yield


def plan_check(folder: Path, kind: str, recipe: Recipe = RECIPE, ranks: int = 1, **settings: Any) -> PlanCheck:
    """Return the listener of a small run on a kind of device."""
    return PlanCheck(
        recipe=ResolvedRecipe(recipe.to_resolved_toml(), ""),
        device=Machine(torch.device(kind)),
        processes=fake(Processes, rank=0, world_size=ranks),
        folder=fake(RunFolder, folder=folder),
        **settings,
    )
