"""Meshes, schedules and precisions on which a recipe is compared with one process."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import attrs

from drawloom.components.ports.distributed import DIMENSIONS, Mesh, Precision
from drawloom.components.ports.experts import Dispatcher
from drawloom.components.ports.pipeline import Executor, Schedule
from drawloom.components.ports.run import Batching
from drawloom.components.ports.stages import Stages
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from drawloom.graph.wiring.graph import Graph

NARROW = {"parameter": "float32", "compute": "bfloat16", "gradient": "float32"}
EXPERT_MESHES: tuple[dict[str, int], ...] = (
    {"pipeline": 2, "data_shard": 2, "expert": 2},
    {"data_shard": 2, "tensor": 2, "expert": 2},
    {"context": 2, "tensor": 2, "expert": 4},
    {"data_replicate": 2, "data_shard": 2, "expert": 2},
)


@attrs.frozen
class Case:
    """
    A change of a recipe that must not change its numbers, on `ranks` processes.

    `sizes` are the mesh dimensions above 1. A narrow case computes in bfloat16.
    """

    name: str
    ranks: int
    values: Mapping[str, Any]
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    is_narrow: bool = False

    def find_refusal(self, recipe: Recipe) -> str:
        """Return why `check` refuses the case, or ""."""
        try:
            recipe.with_values(self.values, "prove").check(skip_machine_checks=True)
        except RecipeError as error:
            return "; ".join(problem.text for problem in error.problems)
        return ""


def list_cases(recipe: Recipe) -> list[Case]:
    """Return the cases, those that find most faults first: single dimensions, schedules, pairs, and narrow dtypes."""
    graph = recipe.graph
    singles = [{name: 2} for name in ("tensor", "context", "pipeline", "data_shard", "data_replicate")]
    meshes = [*singles, {"data_shard": 2, "expert": 2}]
    cases = [
        *(Case("microbatches of other sizes", 1, {name: {"micro_size": 8}}) for name in graph.implementers(Batching)),
        *(_make_mesh_case(graph, sizes) for sizes in meshes),
        *_list_pipeline_cases(graph, recipe),
        *(_make_mesh_case(graph, dict.fromkeys(pair, 2)) for pair in combinations(DIMENSIONS, 2)),
        *(_make_mesh_case(graph, sizes) for sizes in EXPERT_MESHES),
        *(_make_narrow(_make_mesh_case(graph, sizes), graph) for sizes in meshes),
    ]
    return cases


def _make_mesh_case(graph: Graph, sizes: Mapping[str, int]) -> Case:
    ranks = 1
    for name, size in sizes.items():
        ranks *= size if name != "expert" else 1
    values: dict[str, Any] = {name: {"data_replicate": 1, **sizes} for name in graph.implementers(Mesh)}
    if "expert" in sizes and not graph.implementers(Dispatcher):
        values |= {name: {"dispatcher": {"use": "experts.all_to_all"}} for name in graph.implementers(Stages)}
    return Case(", ".join(f"{name} = {size}" for name, size in sizes.items()), ranks, values, sizes)


def _list_pipeline_cases(graph: Graph, recipe: Recipe) -> Iterator[Case]:
    """Yield a case on two pipeline ranks for every schedule that the recipe does not use."""
    mesh = _make_mesh_case(graph, {"pipeline": 2})
    for schedule in graph.implementers(Schedule):
        for use in recipe.project.registry.names():
            if use.startswith("pipeline.schedules.") and use != graph.nodes[schedule].spec.use:
                values = {**mesh.values, schedule: {"use": use}}
                if use.endswith(".circular"):
                    values |= {name: {"use": "pipeline.circular.executor"} for name in graph.implementers(Executor)}
                yield attrs.evolve(mesh, name=f"{mesh.name}, {use.rpartition('.')[2]}", values=values)


def _make_narrow(case: Case, graph: Graph) -> Case:
    """Return a case in bfloat16."""
    values = {**case.values, **{name: NARROW for name in graph.implementers(Precision)}}
    return attrs.evolve(case, name=f"{case.name}, bfloat16", values=values, is_narrow=True)
