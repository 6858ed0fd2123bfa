"""Metrics for sampled completions."""

import pytest
import torch

from drawloom.components.metrics.rollouts import RolloutMetrics
from drawloom.components.ports.rollouts import Completions, Scored
from drawloom.components.ports.run import Step

NAN = torch.nan


def score_rows(rewards: list[float], counts: list[int], cut: list[bool]) -> Scored:
    """Two-row groups with these totals and lengths; tokens have entropy 0.5, and a second reward is twice that."""
    rows, ends = len(rewards), 1 + torch.tensor(counts)
    totals = torch.tensor(rewards, dtype=torch.float64)
    positions = torch.arange(6).expand(rows, -1)
    entropies = torch.where(positions < (ends - 1)[:, None], 0.5, 0.0)
    starts = torch.ones(rows, dtype=torch.int64)
    versions = (3 - 2 * (ends == 2)[:, None].int()).expand_as(positions)  # a row of one token is two updates older
    completions = Completions(positions, starts, ends, -entropies, entropies, ~torch.tensor(cut), versions=versions)
    return Scored(completions, 2, ("one", "two"), torch.stack([totals, 2 * totals], 1), totals, is_stale=ends == 2)


def test_means_are_over_all_completions_of_the_step() -> None:
    """Rows without a score count in lengths alone; a group with one reward, or none, is equal; the lag is by token."""
    metric = RolloutMetrics(rewards={"two": None, "one": None})  # type: ignore[arg-type]
    step = Step(4, 4)
    step.state["rollouts"] = [
        score_rows([1.0, 0.0, 0.5, 0.5], [1, 2, 3, 4], [False] * 4),
        score_rows([NAN, NAN, NAN, 1.0], [5, 5, 5, 3], [True, False, False, True]),
    ]
    largest = torch.tensor([1e-6, 3e-6])
    step.state["losses"] = {"weight": torch.ones(2), "sums": {"largest_difference": largest}}
    totals = {name: torch.as_tensor(value).double() for name, value in metric.measure_on_rank(step).items()}
    assert totals.keys() == metric.accumulators.keys()
    assert all(totals[name].shape == part.shape for name, part in metric.accumulators.items())
    assert metric.compute(totals, step) == {
        "reward": pytest.approx(3.0 / 5),
        "reward/one": pytest.approx(3.0 / 5),
        "reward/two": pytest.approx(6.0 / 5),
        "length": 28 / 8,
        "entropy": 0.5,
        "truncated": 2 / 8,
        "unscored": 3 / 8,
        "equal_groups": 3 / 4,
        "stale": 1 / 8,
        "lag": 2 / 28,
        "sampler_difference": pytest.approx(3e-6),
    }


def test_a_step_without_completions_has_no_means() -> None:
    """The mean over nothing is None."""
    metric = RolloutMetrics()
    step = Step(1, 1)
    assert metric.measure_on_rank(step) == {}
    empty = {name: part.identity_element() for name, part in metric.accumulators.items()}
    assert set(metric.compute(empty, step).values()) == {None}
