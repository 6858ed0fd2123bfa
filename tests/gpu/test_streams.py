"""A stream for each stage of a rank: what is learned is what one stream learns."""

from typing import Any

import pytest
import torch

from support import pipelines
from support.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("streams")]

CASES: list[pipelines.Case] = [
    ("dual_pipe_v", 6, False, False, "plain"),
    ("dual_pipe_v", 6, True, False, "plain"),
    ("zero_bubble_v", 6, False, False, "dft"),
    ("interleaved_1f1b", 8, False, True, "smoothed"),
    ("looped_bfs", 4, False, False, "plain"),
]


def _steps(sizes: dict[str, int], cases: list[pipelines.Case], streams: bool, how: dict[str, Any]) -> Any:
    return pipelines.steps(cases, sizes, "cuda", **how, settings={"streams": streams})


def assert_same(sizes: dict[str, int], ranks: int, cases: list[pipelines.Case], how: dict[str, Any]) -> None:
    """Three times, with streams and without, on every rank."""
    plain = run_ranks(_steps, ranks, sizes, cases, False, how, timeout=120)
    for _ in range(3):
        for found, other in zip(run_ranks(_steps, ranks, sizes, cases, True, how, timeout=120), plain, strict=True):
            for case, mine, theirs in zip(cases, found, other, strict=True):
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12), case
                for what in ("grads", "weights"):
                    for name, tensor in mine[what].items():
                        torch.testing.assert_close(tensor, theirs[what][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_in_streams_of_their_own_learn_the_same(ranks: int) -> None:
    """In float64 after two updates, under schedules with several stages a rank, tied weights too."""
    assert_same({}, ranks, CASES, {"dtypes": pipelines.FLOAT64, "taken": 3, "layers": 8, "lengths": (40, 3)})


@pytest.mark.parametrize("kind", ["plain", "symmetric"])
def test_experts_of_two_gpus_learn_the_same(kind: str) -> None:
    """While one stage's tokens travel, the other stage computes; with sharded dense weights."""
    sizes = {"data_shard": 2, "expert": 2, "pipeline": 1}
    how = {"dtypes": pipelines.FLOAT64, "taken": 3, "layers": 4, "lengths": (6, 4), "experts": 8}
    assert_same(sizes, 2, [("dual_pipe_v", 4, False, False, kind)], how)
