"""Steps of a model with experts on every kind of mesh, against the same steps in one process."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import pytest

from support import pipelines
from support.processes import run_ranks

LAYERS, EXPERTS = 4, 8
PLAIN: pipelines.Case = ("gpipe", 4, True, False, "plain")
SYMMETRIC: pipelines.Case = ("gpipe", 4, True, False, "symmetric")
MUON: pipelines.Case = ("gpipe", 4, True, False, "muon")
EIGHT: pipelines.Case = ("gpipe", 8, True, False, "plain")


@attrs.frozen
class Meshed:
    """Cases on a mesh; pipeline ranks are what the other sizes leave of four."""

    sizes: Mapping[str, int]
    cases: list[pipelines.Case]
    lengths: tuple[int, int] = (4, 1)


def of_schedules(*names: str) -> list[pipelines.Case]:
    """A case for each schedule."""
    return [(name, 4, True, False, "plain") for name in names]


OUTER = pipelines.schedule("circular", stages_per_rank=1, pipeline_parallel_layers=3)

MESHES = [
    Meshed({"data_shard": 4, "expert": 2}, [PLAIN, SYMMETRIC, ("gpipe", 4, False, True, "tempered")]),
    Meshed({"data_shard": 4, "expert": 4}, [MUON]),
    Meshed({"data_shard": 2, "tensor": 2, "expert": 2}, [PLAIN, SYMMETRIC], (5, 1)),
    Meshed({"tensor": 4, "expert": 2}, [MUON], (5, 1)),
    Meshed({"tensor": 2, "data_shard": 2}, [PLAIN], (5, 1)),
    Meshed({"context": 2, "data_shard": 2, "expert": 2}, [PLAIN], (8, 4)),
    Meshed({"context": 2, "tensor": 2, "expert": 4}, [PLAIN], (6, 4)),
    Meshed(
        {"data_shard": 2, "expert": 2},
        [*of_schedules("one_f_one_b", "zero_bubble_v", "dual_pipe_v", "circular"), ("dual_pipe_v", *SYMMETRIC[1:])],
    ),
    Meshed({"data_replicate": 2, "data_shard": 2, "expert": 2}, [MUON]),
    Meshed({"data_replicate": 4, "expert": 4}, [PLAIN, SYMMETRIC, MUON]),
    Meshed({"data_replicate": 4, "expert": 2}, [("gpipe", 4, False, True, "tempered")]),
    Meshed({"data_replicate": 2, "data_shard": 2, "expert": 4}, [MUON]),
    Meshed({"data_replicate": 2, "tensor": 2, "expert": 4}, [PLAIN], (5, 1)),
    Meshed({"data_replicate": 2, "expert": 2}, [*of_schedules("dual_pipe_v"), (OUTER, *PLAIN[1:])]),
]

OF_EIGHT = [
    Meshed({"data_shard": 4, "tensor": 2, "expert": 4}, [EIGHT], (5, 1)),
    Meshed({"data_replicate": 2, "tensor": 2, "context": 2, "expert": 2}, [EIGHT], (6, 4)),
    Meshed({"data_replicate": 2, "tensor": 4, "expert": 2}, [EIGHT], (5, 1)),
    Meshed({"data_replicate": 2, "data_shard": 4, "expert": 2}, [EIGHT]),
    Meshed({"data_shard": 4, "expert": 2}, [("dual_pipe_v", *EIGHT[1:])]),
    Meshed({"data_replicate": 4, "data_shard": 2, "expert": 4}, [EIGHT]),
]


@cache
def whole(case: pipelines.Case, lengths: tuple[int, int]) -> dict[str, Any]:
    """Three steps of a case in one process; its schedule makes no difference there."""
    [found] = pipelines.steps([("gpipe", *case[1:])], step_count=3, layers=LAYERS, lengths=lengths, experts=EXPERTS)
    return found


@pytest.fixture(scope="module")
def meshed() -> list[list[list[dict[str, Any]]]]:
    """What four ranks find on each mesh; in the same processes, since to start these takes longer than the steps."""
    meshes = [(mesh.cases, mesh.sizes, mesh.lengths) for mesh in MESHES]
    return run_ranks(pipelines.steps_on_meshes, 4, meshes, "cpu", pipelines.FLOAT64, 3, LAYERS, EXPERTS, timeout=240)


def named(mesh: Meshed) -> str:
    """What a test calls it."""
    return " ".join(f"{name}={size}" for name, size in mesh.sizes.items())


def assert_same_steps(mesh: Meshed, ranks: list[list[dict[str, Any]]]) -> None:
    """The steps of each case are those of one process, to 1e-10."""
    for number, case in enumerate(mesh.cases):
        pipelines.assert_same_steps([found[number] for found in ranks], whole(("gpipe", *case[1:]), mesh.lengths))


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_three_steps_are_those_of_one_process(mesh: Meshed, meshed: list[list[list[dict[str, Any]]]]) -> None:
    """Losses, norms, gradients and weights after updates equal those of one process in float64, to 1e-10."""
    assert_same_steps(mesh, [found[MESHES.index(mesh)] for found in meshed])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", OF_EIGHT, ids=named)
def test_eight_processes_have_the_steps_of_one(mesh: Meshed) -> None:
    """With replicas of shards of experts, and tensor ranks that have the same: steps are one process's, to 1e-10."""
    common = mesh.sizes, "cpu", pipelines.FLOAT64, 3, LAYERS, mesh.lengths, EXPERTS
    assert_same_steps(mesh, run_ranks(pipelines.steps, 8, mesh.cases, *common, timeout=300))


@pytest.mark.soak
def test_expert_groups_that_straddle_replicas_have_the_steps_of_one_process() -> None:
    """Of six ranks, the middle two share experts across the border of two sharded replicas; steps are one process's."""
    mesh = Meshed({"data_replicate": 2, "context": 3, "expert": 2}, [PLAIN], (6, 3))
    common = mesh.sizes, "cpu", pipelines.FLOAT64, 3, LAYERS, mesh.lengths, EXPERTS
    assert_same_steps(mesh, run_ranks(pipelines.steps, 6, mesh.cases, *common, timeout=300))


def test_mixed_precision_is_that_of_one_process() -> None:
    """With bfloat16 compute, experts that FSDP shards, and casts of experts that it does not, have its gradients."""
    sizes: list[dict[str, int]] = [{"data_shard": 4, "expert": 2}, {"data_shard": 4, "expert": 4}]
    meshes: list[Any] = [([PLAIN], each, (4, 1)) for each in sizes]
    [one] = pipelines.steps([PLAIN], {}, "cpu", pipelines.MIXED, 1, LAYERS, (4, 1), EXPERTS)
    common = meshes, "cpu", pipelines.MIXED, 1, LAYERS, EXPERTS
    meshed = run_ranks(pipelines.steps_on_meshes, 4, *common, timeout=120)
    for number in range(len(sizes)):
        ranks = [found[number][0] for found in meshed]
        assert sum(each["loss"] for each in ranks) == pytest.approx(one["loss"], rel=1e-4)
        for name, grad in pipelines.assemble(ranks, "grads").items():
            assert grad is not None and grad.dtype == one["grads"][name].dtype
            assert (grad - one["grads"][name]).norm() < 0.01 * one["grads"][name].norm(), name


def test_passes_that_are_computed_again_exchange_tokens_again() -> None:
    """With recomputation of blocks, by collectives and by shared memory, steps are those of one process."""
    sizes = {"data_shard": 2, "expert": 2, "pipeline": 1}
    common = "cpu", pipelines.FLOAT64, 3, LAYERS, (4, 1), EXPERTS, ["blocks"]
    ranks = run_ranks(pipelines.steps, 2, [PLAIN, SYMMETRIC], sizes, *common, timeout=120)
    for number, case in enumerate((PLAIN, SYMMETRIC)):
        pipelines.assert_same_steps([found[number] for found in ranks], whole(case, (4, 1)))


def test_each_rank_holds_its_experts_alone(meshed: list[list[list[dict[str, Any]]]]) -> None:
    """A rank has its part of each layer's experts; ranks that have the same ones, if anything is sharded, slices."""
    for place, mesh in enumerate(MESHES):
        if "expert" not in mesh.sizes:
            continue
        replica = math.prod(size for name, size in mesh.sizes.items() if name in ("data_shard", "context", "tensor"))
        among = math.lcm(replica, mesh.sizes["expert"])
        shards = mesh.sizes.keys() & {"data_shard", "context"}
        for found, *_ in (rank[place] for rank in meshed):
            of_experts = {name: part for name, part in found["weights"].items() if ".experts." in name}
            assert of_experts
            for name, part in of_experts.items():
                whole = found["slices"][name].shape
                assert math.prod(whole) == part.numel() * (among if shards else mesh.sizes["expert"]), (mesh, name)
