"""Meshes, schedules and precisions on which a recipe is compared with one process."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from typing import Any

import attrs

from drawloom import RecipeError
from drawloom.components.proving.smallest import DENSE, EXPERTS, STEPS
from drawloom.graph.project import Recipe
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import DIMENSIONS, Batching, Executor, Mesh, Model, Precision, Schedule

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
NARROW = {"parameter": "float32", "compute": "bfloat16", "gradient": "float32"}
EXPERT_MESHES: tuple[dict[str, int], ...] = (
    {"pipeline": 2, "data_shard": 2, "expert": 2},
    {"data_shard": 2, "tensor": 2, "expert": 2},
    {"context": 2, "tensor": 2, "expert": 4},
    {"data_replicate": 2, "data_shard": 2, "expert": 2},
    {"data_shard": 4, "expert": 2},
)


@attrs.frozen
class Case:
    """
    Change to a recipe with the same numbers as before.

    `sizes` are the mesh dimensions above 1. A case resumes from the checkpoint of the case `resumed`, if it has a name.
    A narrow case computes in bfloat16. In a killed case, all ranks are killed after a checkpoint, and resume.
    """

    name: str
    values: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    resumed: str = ""
    is_narrow: bool = False
    is_killed: bool = False

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return prod(self.sizes[name] for name in self.sizes.keys() & {*DIMENSIONS})

    @property
    def last_step(self) -> int:
        """The last step: in bfloat16 the first, since rounding errors grow."""
        return 1 if self.is_narrow else STEPS

    def find_refusal(self, recipe: Recipe) -> str:
        """Return why `check` refuses the case, or why it can't be compared, or ""."""
        models = [recipe.graph.nodes[name] for name in recipe.graph.implementers(Model)]
        others = [node.settings for node in models if node.spec.use != EXPERTS["use"]]
        if self.is_narrow and any(settings.get(key) for settings in others for key in EXPERT_COUNTS):
            return "a router may choose other experts after rounding"
        try:
            recipe.with_values(self.values, "prove").check(skip_machine_checks=True)
        except RecipeError as error:
            return "; ".join(problem.text for problem in error.problems)
        return ""


ONE = Case("one process")
KILLED = {"data_shard": 2}
REPLICATED_PIPELINE = {"pipeline": 2, "data_replicate": 2}
BOTH_ENDS = "zero_bubble_v"
"""A schedule whose first rank has the first and the last stage."""
SINGLE: tuple[dict[str, int], ...] = (
    *({name: 2} for name in ("tensor", "context", "pipeline", "data_shard", "data_replicate")),
    {"data_shard": 2, "expert": 2},
)


def list_cases(recipe: Recipe) -> list[Case]:
    """
    Return the cases, most likely faults first.

    Single dimensions and their checkpoints come before several dimensions, schedules and narrow dtypes.
    """
    graph = recipe.graph
    singles = [_make_mesh_case(graph, sizes) for sizes in SINGLE]
    pairs = [dict.fromkeys(pair, 2) for pair in combinations(DIMENSIONS, 2)]
    return [
        make_killed(ONE),
        *(Case("microbatches of another size", {name: {"micro_size": 8}}) for name in graph.implementers(Batching)),
        *singles,
        make_killed(_make_mesh_case(graph, KILLED)),
        *(
            Case(f"one process, resumed from {case.name}", sizes={"checkpoint": 1}, resumed=case.name)
            for case in singles
        ),
        *(attrs.evolve(case, name=f"{case.name}, resumed from one process", resumed=ONE.name) for case in singles),
        *(_make_mesh_case(graph, sizes) for sizes in (*pairs, *EXPERT_MESHES)),
        *_list_pipeline_cases(graph, recipe),
        *(make_narrow(case, graph) for case in singles if "expert" not in case.sizes),
    ]


def make_killed(case: Case) -> Case:
    """Return a case whose ranks are killed, and resume."""
    return attrs.evolve(case, name=f"{case.name}, killed and resumed", is_killed=True)


def _make_mesh_case(graph: Graph, sizes: Mapping[str, int]) -> Case:
    values: dict[str, Any] = {name: {"data_replicate": 1, **sizes} for name in graph.implementers(Mesh)}
    return Case(", ".join(f"{name} = {size}" for name, size in sizes.items()), values, sizes)


def _list_pipeline_cases(graph: Graph, recipe: Recipe) -> Iterator[Case]:
    """
    Yield a case on two pipeline ranks for every other schedule, and one with replicas for a rank with both ends.
    """
    mesh, replicated = (_make_mesh_case(graph, sizes) for sizes in ({"pipeline": 2}, REPLICATED_PIPELINE))
    for schedule in graph.implementers(Schedule):
        for use in recipe.project.registry.names():
            if use.startswith("pipeline.schedules.") and use != graph.nodes[schedule].spec.use:
                name, values = use.rpartition(".")[2], {schedule: {"use": use}}
                if name == "circular":
                    values |= {node: {"use": "pipeline.circular.executor"} for node in graph.implementers(Executor)}
                for case in (mesh, replicated) if name == BOTH_ENDS else (mesh,):
                    yield attrs.evolve(case, name=f"{case.name}, {name}", values={**case.values, **values})


def make_narrow(case: Case, graph: Graph) -> Case:
    """Return a case in bfloat16 without experts, since a router may choose other experts after rounding."""
    models = {name: DENSE for name in graph.implementers(Model) if graph.nodes[name].spec.use == EXPERTS["use"]}
    values = {**case.values, **models, **dict.fromkeys(graph.implementers(Precision), NARROW)}
    return attrs.evolve(case, name=f"{case.name}, bfloat16", values=values, is_narrow=True)
