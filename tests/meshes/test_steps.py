"""Steps on every kind of mesh, compared with the same steps in one process."""

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
class MeshCases:
    """Cases on a mesh of four ranks. The pipeline has the ranks that the other sizes leave."""

    name: str
    sizes: Mapping[str, int]
    cases: list[pipelines.Case]
    lengths: tuple[int, int] = (4, 1)
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    layers: int = 4


SCHEDULES = ("one_f_one_b", "interleaved_1f1b", "zero_bubble_1p", "zero_bubble_v", "dual_pipe_v", "circular")
"""Schedules that differ in what a rank does between gathers; test_executor.py compares all of them."""

# These are meshes for the core, and families whose weights only tensor ranks divide in their own way. Families have
# layers of at most two types, so two layers have all of them; a pipeline needs four. tests/soak/test_proofs.py compares
# every family on every mesh.

MESHES = [
    MeshCases(
        "shards",
        {"data_shard": 4},
        [("gpipe", 4, True, False, "tempered"), ("gpipe", 4, False, True, "muon")],
        layers=2,
    ),
    MeshCases("replicas", {"data_replicate": 4}, [("gpipe", 8, True, True, "tempered")], layers=2),
    MeshCases(
        "pipelines of replicas",
        {"data_replicate": 2},
        [
            *((name, 4, True, False, "plain") for name in ("zero_bubble_v", "circular")),
            ("one_f_one_b", 4, True, False, "starcoder2"),
        ],
    ),
    MeshCases(
        "replicas of shards", {"data_replicate": 2, "data_shard": 2}, [("gpipe", 4, False, False, "muon")], layers=2
    ),
    MeshCases(
        "pipelines of shards",
        {"data_shard": 2},
        [
            *((name, 4, True, False, "plain") for name in SCHEDULES),
            ("zero_bubble_1p", 4, False, False, "norms"),  # a rank has nothing to train
            ("zero_bubble_v", 4, True, False, "further"),
            ("zero_bubble_v", 4, True, False, "gemma2"),
        ],
    ),
    MeshCases(
        "pipelines of shards, reduced by microbatch",
        {"data_shard": 2},
        [(name, 4, True, False, "plain") for name in ("zero_bubble_v", "circular")],
        settings={"sync_each_microbatch": True},
    ),
    MeshCases(
        "replicas of shards, reduced by microbatch",
        {"data_replicate": 2, "data_shard": 2},
        [("gpipe", 8, True, True, "tempered")],
        settings={"sync_each_microbatch": True},
        layers=2,
    ),
    MeshCases(
        "contexts of shards",
        {"context": 2, "data_shard": 2},
        [
            ("gpipe", 4, True, False, "tempered"),
            ("gpipe", 2, False, False, "nemotron_h"),
            ("gpipe", 2, True, False, "gemma4_linked"),
        ],
        (6, 2),  # ranks have one piece of a row of 6 tokens, and two of a row of 8
        layers=2,
    ),
    MeshCases(
        "tensors of shards",
        {"tensor": 2, "data_shard": 2},
        [
            ("gpipe", 4, True, False, "muon"),
            ("gpipe", 4, False, True, "smoothed"),
            ("gpipe", 4, False, False, "dora"),
            *(("gpipe", 4, True, False, family) for family in ("olmo3", "lfm2", "qwen3_5", "glm_moe_dsa")),
            ("gpipe", 4, False, False, "nemotron_h"),
            ("gpipe", 4, True, False, "gemma4_linked"),
        ],
        layers=2,
    ),
    MeshCases(
        "pipelines of tensors",
        {"tensor": 2},
        [
            ("one_f_one_b", 4, True, False, "dft"),
            ("zero_bubble_v", 4, False, False, "muon"),
            ("zero_bubble_v", 4, False, False, "dora"),
            ("circular", 4, False, False, "plain"),
            *(("zero_bubble_v", 2, True, False, family) for family in ("gemma4", "granite", "glm4_moe", "pattern")),
        ],
    ),
    MeshCases(
        "experts of shards",
        {"data_shard": 4, "expert": 2},
        [("gpipe", 4, False, False, "nemotron_h")],
        layers=2,
    ),
    MeshCases("contexts", {"context": 4}, [("gpipe", 2, False, True, "smoothed")], (8, 8), layers=2),
    MeshCases(
        "pipelines of contexts",
        {"context": 2},
        [(name, 4, True, False, "plain") for name in ("zero_bubble_v", "circular")],
        (6, 4),
    ),
]


WHOLE_ON_TENSOR_RANKS = {"dora", "further", "gemma4", "gemma4_linked", "glm4_moe", "glm_moe_dsa", "nemotron_h"}
"""Cases with adapters, experts, small projections or layers of a loss that every tensor-parallel or shard rank has."""


@cache
def whole(case: pipelines.Case, lengths: tuple[int, int], layers: int = 4) -> dict[str, Any]:
    """Return three steps of a case in one process, where the schedule makes no difference."""
    [steps] = pipelines.steps([("gpipe", *case[1:])], step_count=3, layers=layers, lengths=lengths)
    return steps


def count_elements(rank: Mapping[str, Any]) -> int:
    """Return the number of elements in a rank's weights and moments."""
    count: int = rank["moments"] + sum(part.numel() for part in rank["weights"].values())
    return count


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.name)
def test_three_steps_match_one_process(mesh: MeshCases) -> None:
    """
    Losses, norms, gradients and updated weights equal one process's in float64, to 1e-10, and the first case's
    validation loss.

    Only replicas duplicate weights and moments. Other ranks together hold at most a tenth more than one process, for
    parameters that tensor ranks or the ends of a pipeline share, such as norms. Small adapters are on every rank.
    """
    common = mesh.sizes, "cpu", pipelines.FLOAT64, 3, mesh.layers, mesh.lengths, 0, ("none",), mesh.settings, 1
    ranks = run_ranks(pipelines.steps, 4, mesh.cases, *common, timeout=120)
    for number, case in enumerate(mesh.cases):
        steps, expected = [rank[number] for rank in ranks], whole(("gpipe", *case[1:]), mesh.lengths, mesh.layers)
        pipelines.assert_same_steps(steps, expected)
        limit = 1.1 * mesh.sizes.get("data_replicate", 1) * count_elements(expected)
        assert case[4] in WHOLE_ON_TENSOR_RANKS or sum(map(count_elements, steps)) < limit


OUTER = pipelines.schedule("circular", stages_per_rank=1, pipeline_parallel_layers=4)
OUTSIDE: list[tuple[list[pipelines.Case], Mapping[str, int], tuple[int, int]]] = [
    ([(OUTER, 4, True, False, "plain"), (OUTER, 4, False, True, "tempered")], {"data_shard": 2}, (4, 1)),
    ([(OUTER, 4, False, False, "muon")], {"tensor": 2}, (5, 1)),
    ([(OUTER, 3, True, False, "plain")], {}, (4, 1)),  # the last of four ranks has no microbatch of its own
]


def test_layers_outside_the_circular_pipeline_compute_shares_of_the_microbatches() -> None:
    """
    With four of six layers in stages, steps equal one process's to 1e-10.

    Every rank has the last two layers, and only its own stage's layers before (layer 0 may be frozen).
    """
    ranks = run_ranks(
        pipelines.steps_on_meshes, 4, OUTSIDE, "cpu", pipelines.FLOAT64, 3, 6, 0, ("none",), {}, 1, timeout=120
    )
    for position, (cases, sizes, lengths) in enumerate(OUTSIDE):
        for number, case in enumerate(cases):
            steps = [rank[position][number] for rank in ranks]
            [expected] = pipelines.steps([("gpipe", *case[1:])], step_count=3, layers=6, lengths=lengths)
            pipelines.assert_same_steps(steps, expected)
            inner = 4 // (4 // math.prod(sizes.values()))
            for rank in steps:
                layers = {int(name.split(".")[2]) for name in rank["weights"] if name.startswith("model.layers.")}
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
def test_eight_processes_match_one_process(sizes: Mapping[str, int]) -> None:
    """Steps equal one process's to 1e-10 on every combination of dimensions, with the remaining ranks in a pipeline."""
    cases: list[pipelines.Case] = [("one_f_one_b", 8, True, False, "plain"), ("gpipe", 8, False, False, "tempered")]
    lengths = (8, 4)
    ranks = run_ranks(pipelines.steps, 8, cases, sizes, "cpu", pipelines.FLOAT64, 3, 4, lengths, timeout=300)
    for number, case in enumerate(cases):
        pipelines.assert_same_steps([rank[number] for rank in ranks], whole(("gpipe", *case[1:]), lengths))


def test_mixed_precision_matches_one_process() -> None:
    """Loss and gradients equal one process's to bfloat16 precision, with and without float32 master weights."""
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
        one = pipelines.steps([("gpipe", *case[1:])], {}, "cpu", precision, layers=4, lengths=lengths)[0]
        cases = [([case], sizes, lengths) for sizes in meshes]
        meshed = run_ranks(pipelines.steps_on_meshes, ranks, cases, "cpu", precision, 1, 4, timeout=120)
        for number, sizes in enumerate(meshes):
            steps = [rank[number][0] for rank in meshed]
            assert sum(rank["loss"] for rank in steps) == pytest.approx(one["loss"], rel=1e-4), sizes
            for name, grad in pipelines.assemble(steps, "grads").items():
                expected = one["grads"][name]
                assert grad is not None and grad.dtype == dtype
                assert (grad - expected).norm() < part * expected.norm(), (sizes, name)
