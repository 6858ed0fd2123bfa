"""One CUDA stream per stage computes the same as a single stream."""

from typing import Any

import pytest
import torch

from drawloom.components.pipeline.streams import ConcurrentStages
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
    return pipelines.steps(cases, sizes, "cuda", **how, features=[ConcurrentStages] if streams else [])


def assert_same(sizes: dict[str, int], ranks: int, cases: list[pipelines.Case], how: dict[str, Any]) -> None:
    """Assert equal steps with and without streams, three times, on every rank."""
    plain = run_ranks(_steps, ranks, sizes, cases, False, how, timeout=120)
    for _ in range(3):
        for streamed, other in zip(run_ranks(_steps, ranks, sizes, cases, True, how, timeout=120), plain, strict=True):
            for case, mine, theirs in zip(cases, streamed, other, strict=True):
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12), case
                for kind in ("grads", "weights"):
                    for name, tensor in mine[kind].items():
                        torch.testing.assert_close(tensor, theirs[kind][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_in_separate_streams_compute_the_same(ranks: int) -> None:
    """With a stream per stage, float64 results after two updates equal the results with a single stream."""
    assert_same({}, ranks, CASES, {"dtypes": pipelines.FLOAT64, "step_count": 3, "layers": 8, "lengths": (40, 3)})


@pytest.mark.parametrize("kind", ["plain", "symmetric"])
def test_experts_on_two_gpus_compute_the_same(kind: str) -> None:
    """Results are the same if one stage computes while the other stage's tokens are sent."""
    sizes = {"data_shard": 2, "expert": 2, "pipeline": 1}
    how = {"dtypes": pipelines.FLOAT64, "step_count": 3, "layers": 4, "lengths": (6, 4), "experts": 8}
    assert_same(sizes, 2, [("dual_pipe_v", 4, False, False, kind)], how)
