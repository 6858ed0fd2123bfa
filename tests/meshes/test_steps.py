"""Steps on every kind of mesh, against the same steps in one process."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import pytest
import torch

from support import pipelines
from support.processes import run_ranks


@attrs.frozen
class Meshed:
    """Cases on a mesh; pipeline ranks are what the other sizes leave of four."""

    name: str
    sizes: Mapping[str, int]
    cases: list[pipelines.Case]
    lengths: tuple[int, int] = (4, 1)
    settings: Mapping[str, Any] = attrs.field(factory=dict)


MESHES = [
    Meshed("shards", {"data_shard": 4}, [("gpipe", 4, True, False, "tempered"), ("gpipe", 4, False, True, "muon")]),
    Meshed("replicas", {"data_replicate": 4}, [("gpipe", 8, True, True, "tempered")]),
    Meshed(
        "pipelines of replicas",
        {"data_replicate": 2},
        [(name, 4, True, False, "plain") for name in ("one_f_one_b", "zero_bubble_v", "circular")],
    ),
    Meshed("replicas of shards", {"data_replicate": 2, "data_shard": 2}, [("gpipe", 4, False, False, "muon")]),
    Meshed("pipelines of shards", {"data_shard": 2}, [(name, 4, True, False, "plain") for name in pipelines.TRAINING]),
    Meshed(
        "pipelines of shards, reduced by microbatch",
        {"data_shard": 2},
        [(name, 4, True, False, "plain") for name in ("one_f_one_b", "zero_bubble_v", "circular")],
        settings={"sync_each_microbatch": True},
    ),
    Meshed(
        "replicas of shards, reduced by microbatch",
        {"data_replicate": 2, "data_shard": 2},
        [("gpipe", 8, True, True, "tempered")],
        settings={"sync_each_microbatch": True},
    ),
    Meshed("contexts of shards", {"context": 2, "data_shard": 2}, [("gpipe", 4, True, False, "tempered")], (8, 4)),
    Meshed(
        "tensors of shards",
        {"tensor": 2, "data_shard": 2},
        [
            ("gpipe", 4, True, False, "muon"),
            ("gpipe", 4, False, True, "smoothed"),
            ("gpipe", 4, False, False, "dora"),
        ],
    ),
    Meshed(
        "pipelines of tensors",
        {"tensor": 2},
        [
            ("one_f_one_b", 4, True, False, "dft"),
            ("zero_bubble_v", 4, False, False, "muon"),
            ("zero_bubble_v", 4, False, False, "dora"),
            ("circular", 4, False, False, "plain"),
        ],
    ),
    Meshed("contexts", {"context": 4}, [("gpipe", 2, False, True, "smoothed")], (8, 8)),
    Meshed(
        "pipelines of contexts",
        {"context": 2},
        [(name, 4, True, False, "plain") for name in ("one_f_one_b", "zero_bubble_v", "circular")],
        (6, 4),
    ),
]


@cache
def whole(case: pipelines.Case, lengths: tuple[int, int]) -> dict[str, Any]:
    """Three steps of a case in one process; its schedule makes no difference there."""
    [found] = pipelines.steps([("gpipe", *case[1:])], taken=3, layers=4, lengths=lengths)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.name)
def test_three_steps_are_those_of_one_process(mesh: Meshed) -> None:
    """Losses, norms, gradients and weights after updates equal those of one process in float64, to 1e-10."""
    common = mesh.sizes, "cpu", pipelines.FLOAT64, 3, 4, mesh.lengths, 0, ("none",), mesh.settings
    ranks = run_ranks(pipelines.steps, 4, mesh.cases, *common, timeout=120)
    for number, case in enumerate(mesh.cases):
        pipelines.assert_same_steps([found[number] for found in ranks], whole(("gpipe", *case[1:]), mesh.lengths))


EIGHT: list[Mapping[str, int]] = [
    {"data_shard": 8},
    {"data_replicate": 2, "data_shard": 4},
    {"tensor": 2, "data_shard": 4},
    {"context": 2, "data_shard": 4},
    {"data_replicate": 2, "context": 2, "tensor": 2},
    {"data_replicate": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
    {"data_shard": 4},
]


@pytest.mark.soak
@pytest.mark.parametrize("sizes", EIGHT, ids=lambda sizes: " ".join(f"{name}={size}" for name, size in sizes.items()))
def test_eight_processes_have_the_steps_of_one(sizes: Mapping[str, int]) -> None:
    """On every combination of dimensions, of which pipelines take the rest, steps are one process's to 1e-10."""
    cases: list[pipelines.Case] = [("one_f_one_b", 8, True, False, "plain"), ("gpipe", 8, False, False, "tempered")]
    lengths = (8, 4)
    ranks = run_ranks(pipelines.steps, 8, cases, sizes, "cpu", pipelines.FLOAT64, 3, 4, lengths, timeout=300)
    for number, case in enumerate(cases):
        pipelines.assert_same_steps([found[number] for found in ranks], whole(("gpipe", *case[1:]), lengths))


def test_mixed_precision_on_shards_is_that_of_one_process() -> None:
    """Shards have the loss and gradients of one process, to bfloat16, with float32 masters and without."""
    tied: pipelines.Case = ("gpipe", 4, True, False, "plain")
    split: pipelines.Case = ("zero_bubble_v", 4, False, False, "plain")
    sizes, narrow = {"data_shard": 2}, {"parameter": "bfloat16"}
    for case, precision, dtype, part in (
        (tied, pipelines.MIXED, torch.float32, 0.01),
        (split, pipelines.MIXED, torch.float32, 0.01),
        (tied, narrow, torch.bfloat16, 0.03),  # 4 microbatches are added up in bfloat16, each sum 0.4 % off at most
    ):
        ranks = 2 if case == tied else 4
        [one] = run_ranks(pipelines.steps, 1, [("gpipe", *case[1:])], {}, "cpu", precision)
        meshed = run_ranks(pipelines.steps, ranks, [case], sizes, "cpu", precision, timeout=120)
        assert sum(each[0]["loss"] for each in meshed) == pytest.approx(one[0]["loss"], rel=1e-4)
        for name, grad in pipelines.assembled([each[0] for each in meshed], "grads").items():
            expected = one[0]["grads"][name]
            assert grad is not None and grad.dtype == dtype
            assert (grad - expected).norm() < part * expected.norm(), name
