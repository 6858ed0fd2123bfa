"""Steps on every kind of mesh, against the same steps in one process."""

import math
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
    Meshed(
        "pipelines of shards",
        {"data_shard": 2},
        [
            *((name, 4, True, False, "plain") for name in pipelines.TRAINING),
            ("zero_bubble_1p", 4, False, False, "norms"),  # a rank has nothing to train
            ("zero_bubble_v", 4, True, False, "transformers"),
        ],
    ),
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
    Meshed(
        "contexts of shards",
        {"context": 2, "data_shard": 2},
        [
            ("gpipe", 4, True, False, "tempered"),
            *(("gpipe", 4, True, False, family) for family in pipelines.FAMILIES if family != "qwen3_5"),
        ],
        (8, 4),
    ),
    Meshed(
        "tensors of shards",
        {"tensor": 2, "data_shard": 2},
        [
            ("gpipe", 4, True, False, "muon"),
            ("gpipe", 4, False, True, "smoothed"),
            ("gpipe", 4, False, False, "dora"),
            *(("gpipe", 4, True, False, family) for family in pipelines.FAMILIES),
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
            *(("zero_bubble_v", 4, True, False, family) for family in pipelines.FAMILIES),
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


WHOLE_ON_TENSOR_RANKS = {"dora", "gpt_oss", "glm4_moe", "deepseek_v3"}
"""Cases whose adapters or experts every tensor-parallel rank has."""


@cache
def whole(case: pipelines.Case, lengths: tuple[int, int]) -> dict[str, Any]:
    """Three steps of a case in one process; its schedule makes no difference there."""
    [found] = pipelines.steps([("gpipe", *case[1:])], step_count=3, layers=4, lengths=lengths)
    return found


def held(found: Mapping[str, Any]) -> int:
    """The elements of a rank's weights and moments."""
    count: int = found["moments"] + sum(part.numel() for part in found["weights"].values())
    return count


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.name)
def test_three_steps_are_those_of_one_process(mesh: Meshed) -> None:
    """
    Losses, norms, gradients and weights after updates equal those of one process in float64, to 1e-10.

    Only replicas have the same weights and moments; else ranks have those of one process together, and a tenth more for
    what tensor ranks or the ends of a pipeline share, such as norms. Adapters are small, and on every rank.
    """
    common = mesh.sizes, "cpu", pipelines.FLOAT64, 3, 4, mesh.lengths, 0, ("none",), mesh.settings
    ranks = run_ranks(pipelines.steps, 4, mesh.cases, *common, timeout=120)
    for number, case in enumerate(mesh.cases):
        found, expected = [each[number] for each in ranks], whole(("gpipe", *case[1:]), mesh.lengths)
        pipelines.assert_same_steps(found, expected)
        most = 1.1 * mesh.sizes.get("data_replicate", 1) * held(expected)
        assert case[4] in WHOLE_ON_TENSOR_RANKS or sum(map(held, found)) < most


OUTER = pipelines.schedule("circular", stages_per_rank=1, pipeline_parallel_layers=4)
OUTSIDE: list[tuple[list[pipelines.Case], Mapping[str, int], tuple[int, int]]] = [
    ([(OUTER, 4, True, False, "plain"), (OUTER, 4, False, True, "tempered")], {"data_shard": 2}, (4, 1)),
    ([(OUTER, 4, True, False, "muon")], {"data_replicate": 2}, (4, 1)),
    ([(OUTER, 4, False, False, "plain")], {"tensor": 2}, (5, 1)),
    ([(OUTER, 4, True, False, "plain")], {"context": 2}, (6, 4)),
    ([(OUTER, 3, True, False, "plain")], {}, (4, 1)),  # the last of four ranks has no microbatch of its own
]


def test_layers_outside_of_the_circular_pipeline_are_computed_for_a_share_of_the_microbatches() -> None:
    """
    With four of six layers in stages steps are one process's, to 1e-10.

    Each rank has the last two layers, and of the others its own alone, of which layer 0 may be frozen.
    """
    ranks = run_ranks(pipelines.steps_on_meshes, 4, OUTSIDE, "cpu", pipelines.FLOAT64, 3, 6, timeout=120)
    for place, (cases, sizes, lengths) in enumerate(OUTSIDE):
        for number, case in enumerate(cases):
            found = [each[place][number] for each in ranks]
            [expected] = pipelines.steps([("gpipe", *case[1:])], step_count=3, layers=6, lengths=lengths)
            pipelines.assert_same_steps(found, expected)
            inner = 4 // (4 // math.prod(sizes.values()))
            for each in found:
                layers = {int(name.split(".")[2]) for name in each["weights"] if name.startswith("model.layers.")}
                assert layers >= {4, 5} and inner - 1 <= len(layers - {4, 5}) <= inner


EIGHT: list[Mapping[str, int]] = [
    {"data_shard": 8},
    {"data_replicate": 2, "data_shard": 4},
    {"tensor": 2, "data_shard": 4},
    {"context": 2, "data_shard": 4},
    {"data_replicate": 2, "context": 2, "tensor": 2},
    {"data_replicate": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
    {"data_shard": 4},
    {"data_replicate": 2, "data_shard": 2},
    {"tensor": 2, "data_shard": 2},
    {"context": 2, "data_shard": 2},
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


def test_mixed_precision_is_that_of_one_process() -> None:
    """Loss and gradients are those of one process, to bfloat16, with float32 masters and without, on each dimension."""
    tied: pipelines.Case = ("gpipe", 4, True, False, "plain")
    split: pipelines.Case = ("zero_bubble_v", 4, False, False, "plain")
    data: list[Mapping[str, int]] = [{"data_shard": 2}, {"data_replicate": 2}]
    rows: list[Mapping[str, int]] = [{"tensor": 2}, {"context": 2}]
    narrow = {"parameter": "bfloat16"}
    for case, meshes, precision, dtype, part in (
        (tied, data, pipelines.MIXED, torch.float32, 0.01),
        (tied, rows, pipelines.MIXED, torch.float32, 0.03),  # activations are sums of bfloat16 of two ranks
        (split, data[:1], pipelines.MIXED, torch.float32, 0.01),
        (tied, data[:1], narrow, torch.bfloat16, 0.03),  # each of 4 sums in bfloat16 is 0.4 % off at most
    ):
        ranks, lengths = 2 if case == tied else 4, (4, 2)
        one = pipelines.steps([("gpipe", *case[1:])], {}, "cpu", precision, lengths=lengths)[0]
        cases = [([case], sizes, lengths) for sizes in meshes]
        meshed = run_ranks(pipelines.steps_on_meshes, ranks, cases, "cpu", precision, timeout=120)
        for number, sizes in enumerate(meshes):
            mine = [each[number][0] for each in meshed]
            assert sum(each["loss"] for each in mine) == pytest.approx(one["loss"], rel=1e-4), sizes
            for name, grad in pipelines.assemble(mine, "grads").items():
                expected = one["grads"][name]
                assert grad is not None and grad.dtype == dtype
                assert (grad - expected).norm() < part * expected.norm(), (sizes, name)
