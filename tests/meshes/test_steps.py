"""Steps on every kind of mesh, against the same steps in one process."""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from support import pipelines
from support.processes import run_ranks

SCHEDULES = ("one_f_one_b", "zero_bubble_v")


@attrs.frozen
class Meshed:
    """Cases on a mesh; pipeline ranks are what the other sizes leave of four."""

    name: str
    sizes: Mapping[str, int]
    cases: list[pipelines.Case]


MESHES = [
    Meshed("shards", {"data_shard": 4}, [("gpipe", 8, True, False, "tempered"), ("gpipe", 4, False, True, "plain")]),
    Meshed("replicas of shards", {"data_replicate": 2, "data_shard": 2}, [("gpipe", 8, False, False, "smoothed")]),
    Meshed("pipelines of shards", {"data_shard": 2}, [(name, 8, True, False, "plain") for name in pipelines.TRAINING]),
]


@pytest.fixture(scope="module")
def whole() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Three steps of each case in one process, by what the case is beside its schedule."""
    cases = sorted({("gpipe", *case[1:]) for mesh in MESHES for case in mesh.cases})
    return {case[1:]: found for case, found in zip(cases, pipelines.steps(cases, taken=3, layers=4), strict=True)}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.name)
def test_three_steps_are_those_of_one_process(mesh: Meshed, whole: Any) -> None:
    """Losses, norms, gradients and weights after updates equal those of one process in float64, to 1e-10."""
    ranks = run_ranks(pipelines.steps, 4, mesh.cases, mesh.sizes, "cpu", pipelines.FLOAT64, 3, 4, timeout=120)
    for number, case in enumerate(mesh.cases):
        pipelines.assert_same_steps([found[number] for found in ranks], whole[case[1:]])


def test_mixed_precision_on_shards_is_that_of_one_process() -> None:
    """With float32 masters and bfloat16 compute, shards have the loss and gradients of one process, to bfloat16."""
    cases: list[pipelines.Case] = [("gpipe", 4, True, False, "plain"), ("zero_bubble_v", 4, False, False, "plain")]
    sizes = {"data_shard": 2}
    for case in cases:
        ranks = 2 if case[0] == "gpipe" else 4
        [one] = run_ranks(pipelines.steps, 1, [("gpipe", *case[1:])], {}, "cpu", pipelines.MIXED)
        meshed = run_ranks(pipelines.steps, ranks, [case], sizes, "cpu", pipelines.MIXED, timeout=120)
        assert sum(each[0]["loss"] for each in meshed) == pytest.approx(one[0]["loss"], rel=1e-4)
        for name, grad in pipelines.assembled([each[0] for each in meshed], "grads").items():
            expected = one[0]["grads"][name]
            assert grad is not None and grad.dtype == torch.float32
            assert (grad - expected).norm() < 0.01 * expected.norm(), name
