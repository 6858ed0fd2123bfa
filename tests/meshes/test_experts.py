"""Steps of a model with experts on every kind of mesh, compared with the same steps in one process."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import pytest

from support import pipelines
from support.processes import run_ranks

STEPS, LAYERS, EXPERTS = 2, 4, 8  # test_steps.py compares third steps, after an update by moments of the second
PLAIN: pipelines.Case = ("gpipe", 4, True, False, "plain")
SYMMETRIC: pipelines.Case = ("gpipe", 4, True, False, "symmetric")
MUON: pipelines.Case = ("gpipe", 4, True, False, "muon")
EIGHT: pipelines.Case = ("gpipe", 8, True, False, "plain")


@attrs.frozen
class MeshCases:
    """Cases on a mesh of four ranks. The pipeline has the ranks that the other sizes leave."""

    sizes: Mapping[str, int]
    cases: list[pipelines.Case]
    lengths: tuple[int, int] = (4, 1)

    @property
    def layers(self) -> int:
        """Return the number of layers: four for a pipeline, or else a frozen one, a dense one and one with experts."""
        ranks = math.prod(size for name, size in self.sizes.items() if name != "expert")
        return 3 if ranks == 4 and all(case[0] == "gpipe" for case in self.cases) else LAYERS


def schedule_cases(*names: str) -> list[pipelines.Case]:
    """Return one case per schedule."""
    return [(name, 4, True, False, "plain") for name in names]


OUTER = pipelines.schedule("circular", stages_per_rank=1, pipeline_parallel_layers=3)

MESHES = [
    MeshCases({"data_shard": 4, "expert": 2}, [PLAIN, SYMMETRIC, ("gpipe", 4, False, True, "tempered")]),
    MeshCases({"data_shard": 4, "expert": 4}, [MUON]),
    MeshCases({"data_shard": 2, "tensor": 2, "expert": 2}, [SYMMETRIC], (5, 1)),
    MeshCases({"tensor": 4, "expert": 2}, [MUON], (5, 1)),
    MeshCases({"tensor": 2, "data_shard": 2}, [PLAIN], (5, 1)),
    MeshCases({"context": 2, "data_shard": 2, "expert": 2}, [PLAIN], (8, 4)),
    MeshCases({"context": 2, "tensor": 2, "expert": 4}, [PLAIN], (6, 4)),
    MeshCases(
        {"data_shard": 2, "expert": 2},
        [*schedule_cases("zero_bubble_v", "circular"), ("dual_pipe_v", *SYMMETRIC[1:])],
    ),
    MeshCases({"data_replicate": 2, "data_shard": 2, "expert": 2}, [MUON]),
    MeshCases({"data_replicate": 4, "expert": 4}, [SYMMETRIC, MUON]),
    MeshCases({"data_replicate": 4, "expert": 2}, [("gpipe", 4, False, True, "tempered")]),
    MeshCases({"data_replicate": 2, "data_shard": 2, "expert": 4}, [MUON]),
    MeshCases({"data_replicate": 2, "tensor": 2, "expert": 4}, [PLAIN], (5, 1)),
    MeshCases({"data_replicate": 2, "expert": 2}, [(OUTER, *PLAIN[1:])]),
]

EIGHT_RANK_MESHES = [
    MeshCases({"data_shard": 4, "tensor": 2, "expert": 4}, [EIGHT], (5, 1)),
    MeshCases({"data_replicate": 2, "tensor": 2, "context": 2, "expert": 2}, [EIGHT], (6, 4)),
    MeshCases({"data_replicate": 2, "tensor": 4, "expert": 2}, [EIGHT], (5, 1)),
    MeshCases({"data_replicate": 2, "data_shard": 4, "expert": 2}, [EIGHT]),
    MeshCases({"data_shard": 4, "expert": 2}, [("dual_pipe_v", *EIGHT[1:])]),
    MeshCases({"data_replicate": 4, "data_shard": 2, "expert": 4}, [EIGHT]),
]


@cache
def whole(case: pipelines.Case, lengths: tuple[int, int], layers: int) -> dict[str, Any]:
    """Return steps of a case in one process, where the schedule makes no difference."""
    [steps] = pipelines.steps([("gpipe", *case[1:])], step_count=STEPS, layers=layers, lengths=lengths, experts=EXPERTS)
    return steps


@pytest.fixture(scope="module")
def steps_on_meshes() -> dict[str, list[list[dict[str, Any]]]]:
    """Return four ranks' steps by mesh, in shared processes because starting takes longer than the steps."""
    steps_by_mesh: dict[str, list[list[dict[str, Any]]]] = {}
    for layers in (3, LAYERS):
        meshes = [mesh for mesh in MESHES if mesh.layers == layers]
        work = [(mesh.cases, mesh.sizes, mesh.lengths) for mesh in meshes]
        common: Any = work, "cpu", pipelines.FLOAT64, STEPS, layers, EXPERTS, ("none",), {}, 1
        ranks = run_ranks(pipelines.steps_on_meshes, 4, *common, timeout=240)
        steps_by_mesh |= {mesh_id(mesh): [rank[number] for rank in ranks] for number, mesh in enumerate(meshes)}
    return steps_by_mesh


def mesh_id(mesh: MeshCases) -> str:
    """Return a mesh's test id."""
    return " ".join(f"{name}={size}" for name, size in mesh.sizes.items())


def assert_same_steps(mesh: MeshCases, ranks: list[list[dict[str, Any]]]) -> None:
    """Assert that every case's steps equal one process's to 1e-10."""
    for number, case in enumerate(mesh.cases):
        expected = whole(("gpipe", *case[1:]), mesh.lengths, mesh.layers)
        pipelines.assert_same_steps([rank[number] for rank in ranks], expected)


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_steps_match_one_process(mesh: MeshCases, steps_on_meshes: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Losses, norms, gradients and updated weights equal one process's in float64, to 1e-10."""
    assert_same_steps(mesh, steps_on_meshes[mesh_id(mesh)])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", EIGHT_RANK_MESHES, ids=mesh_id)
def test_eight_processes_match_one_process(mesh: MeshCases) -> None:
    """With sharded and replicated experts, and tensor ranks that share experts, steps equal one process's to 1e-10."""
    common = mesh.sizes, "cpu", pipelines.FLOAT64, STEPS, mesh.layers, mesh.lengths, EXPERTS
    assert_same_steps(mesh, run_ranks(pipelines.steps, 8, mesh.cases, *common, timeout=300))


@pytest.mark.soak
def test_expert_groups_across_replicas_match_one_process() -> None:
    """Steps equal one process's if the middle two of six ranks share experts across the border of two replicas."""
    mesh = MeshCases({"data_replicate": 2, "context": 3, "expert": 2}, [PLAIN], (6, 3))
    common = mesh.sizes, "cpu", pipelines.FLOAT64, STEPS, mesh.layers, mesh.lengths, EXPERTS
    assert_same_steps(mesh, run_ranks(pipelines.steps, 6, mesh.cases, *common, timeout=300))


def test_mixed_precision_matches_one_process() -> None:
    """With bfloat16 compute, experts have one process's gradients, whether FSDP shards them or they are only cast."""
    sizes: list[dict[str, int]] = [{"data_shard": 4, "expert": 2}, {"data_shard": 4, "expert": 4}]
    meshes: list[Any] = [([PLAIN], size, (4, 1)) for size in sizes]
    [one] = pipelines.steps([PLAIN], {}, "cpu", pipelines.MIXED, 1, 3, (4, 1), EXPERTS)
    common = meshes, "cpu", pipelines.MIXED, 1, 3, EXPERTS
    steps_on_meshes = run_ranks(pipelines.steps_on_meshes, 4, *common, timeout=120)
    for number in range(len(sizes)):
        ranks = [steps[number][0] for steps in steps_on_meshes]
        assert sum(size["loss"] for size in ranks) == pytest.approx(one["loss"], rel=1e-4)
        for name, grad in pipelines.assemble(ranks, "grads").items():
            assert grad is not None and grad.dtype == one["grads"][name].dtype
            assert (grad - one["grads"][name]).norm() < 0.01 * one["grads"][name].norm(), name


def test_recomputed_passes_exchange_tokens_again() -> None:
    """With recomputed blocks, steps by collectives and by shared memory equal one process's."""
    sizes = {"data_shard": 2, "expert": 2, "pipeline": 1}
    common = "cpu", pipelines.FLOAT64, STEPS, 3, (4, 1), EXPERTS, ["blocks"]
    ranks = run_ranks(pipelines.steps, 2, [PLAIN, SYMMETRIC], sizes, *common, timeout=120)
    for number, case in enumerate((PLAIN, SYMMETRIC)):
        pipelines.assert_same_steps([rank[number] for rank in ranks], whole(case, (4, 1), 3))


def test_every_rank_holds_only_its_experts(steps_on_meshes: dict[str, list[list[dict[str, Any]]]]) -> None:
    """A rank has its share of every layer's experts; if the mesh shards, ranks with the same experts have slices."""
    for mesh in MESHES:
        if "expert" not in mesh.sizes:
            continue
        replica = math.prod(size for name, size in mesh.sizes.items() if name in ("data_shard", "context", "tensor"))
        sharers = math.lcm(replica, mesh.sizes["expert"])
        shards = mesh.sizes.keys() & {"data_shard", "context"}
        for steps, *_ in steps_on_meshes[mesh_id(mesh)]:
            expert_weights = {name: part for name, part in steps["weights"].items() if ".experts." in name}
            assert expert_weights
            for name, part in expert_weights.items():
                whole = steps["slices"][name].shape
                assert math.prod(whole) == part.numel() * (sharers if shards else mesh.sizes["expert"]), (mesh, name)
