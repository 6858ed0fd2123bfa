"""Meshes over NCCL: two or four processes, on separate GPUs or sharing one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from support import pipelines
from support.processes import run_ranks

pytestmark = pytest.mark.gpu

CASES: list[pipelines.Case] = [
    ("gpipe", 4, True, False, "tempered"),
    ("one_f_one_b", 4, False, True, "plain"),
    ("looped_bfs", 4, True, False, "smoothed"),
]
SPLIT: list[pipelines.Case] = [(name, 8, True, False, "dft") for name in pipelines.TRAINING]


@pytest.mark.parametrize(
    ("ranks", "sizes", "cases"),
    [
        (2, {"data_shard": 2}, CASES),
        (4, {"data_replicate": 2, "data_shard": 2}, CASES),
        (4, {"data_shard": 2}, SPLIT),
        (2, {"data_replicate": 2}, CASES),
        (2, {"tensor": 2}, CASES),
        (4, {"tensor": 2, "data_shard": 2}, CASES),
        (4, {"tensor": 2}, SPLIT[:3]),
    ],
    ids=[
        "shards",
        "replicas of shards",
        "pipelines of shards",
        "replicas",
        "tensors",
        "tensors of shards",
        "pipelines of tensors",
    ],
)
def test_steps_over_nccl_match_one_process(ranks: int, sizes: Mapping[str, int], cases: list[pipelines.Case]) -> None:
    """Three steps over NCCL have one process's losses, norms, gradients and weights in float64, to 1e-10."""
    alone = sorted({("gpipe", *case[1:]) for case in cases})
    (steps,) = run_ranks(pipelines.steps, 1, alone, {}, "cuda", pipelines.FLOAT64, 3, timeout=120)
    whole = {case[1:]: step for case, step in zip(alone, steps, strict=True)}
    meshed = run_ranks(pipelines.steps, ranks, cases, sizes, "cuda", pipelines.FLOAT64, 3, timeout=180)
    for number, case in enumerate(cases):
        pipelines.assert_same_steps([rank[number] for rank in meshed], whole[case[1:]])


def test_context_parallel_gpus_match_one_process() -> None:
    """Two GPUs with half rows of several documents have one process's losses and gradients in float64."""
    cases: list[pipelines.Case] = [("gpipe", 2, True, False, "plain"), ("gpipe", 2, False, False, "tempered")]
    common = "cuda", pipelines.FLOAT64, 3, 2, (8, 8)
    (steps,) = run_ranks(pipelines.steps, 1, cases, {}, *common, timeout=120)
    meshed = run_ranks(pipelines.steps, 2, cases, {"context": 2}, *common, timeout=120)
    for number in range(len(cases)):
        pipelines.assert_same_steps([rank[number] for rank in meshed], steps[number])


@pytest.mark.parametrize("kind", ["plain", "symmetric"])
@pytest.mark.parametrize("sizes", [{"data_shard": 2}, {"tensor": 2}, {"context": 2}], ids=str)
def test_expert_parallel_gpus_match_one_process(sizes: Mapping[str, int], kind: str) -> None:
    """Two GPUs with half of the experts have one process's losses, norms, gradients and weights in three steps."""
    cases: list[pipelines.Case] = [("gpipe", 2, True, False, kind)]
    common = "cuda", pipelines.FLOAT64, 3, 4, (6, 4), 8
    (steps,) = run_ranks(pipelines.steps, 1, cases, {}, *common, timeout=120)
    meshed = run_ranks(pipelines.steps, 2, cases, {**sizes, "expert": 2}, *common, timeout=120)
    pipelines.assert_same_steps([rank[0] for rank in meshed], steps[0])


def test_mixed_precision_on_shards_matches_one_process() -> None:
    """With float32 master weights and bfloat16 compute, shards have one process's losses and gradients."""
    cases: list[pipelines.Case] = [("gpipe", 4, True, False, "plain")]
    (steps,) = run_ranks(pipelines.steps, 1, cases, {}, "cuda", pipelines.MIXED, 1, timeout=120)
    meshed: list[Any] = run_ranks(pipelines.steps, 2, cases, {"data_shard": 2}, "cuda", pipelines.MIXED, 1, timeout=120)
    grads = pipelines.assemble([rank[0] for rank in meshed], "grads")
    assert sum(rank[0]["loss"] for rank in meshed) == pytest.approx(steps[0]["loss"], rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, steps[0]["grads"][name], rtol=1e-3, atol=1e-5)
