"""Rewards, lengths and entropies of sampled completions, and their agreement with the training pass."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from drawloom import Every, component
from drawloom.components.metrics.named_sums import read_losses_on_last_stage
from drawloom.ports import FAULTS, Accumulator, MetricTotals, MetricValues, Reward, Scored, Step

LARGEST_DIFFERENCE = "largest_difference"

SUMS = ("rows", "scored", "stale", "reward", "tokens", "entropy", "truncated", "groups", "equal", "turns", "lag")


@component(impact="safe")
class RolloutMetrics:
    """
    Means over a step's completions: `reward`, `length` in tokens, `truncated`, and `entropy` in nats per token.

    With several rewards, each has its mean as `reward/NAME`. `unscored` is the fraction of completions without a score,
    `stale` the fraction too old to learn from, and `equal_groups` the fraction of prompts whose completions all
    have one reward, from which nothing is learnt. `sampler_difference` is the largest distance between the
    log-probability that a token was sampled with and that in the training pass: 0 if both have the same bits. Only
    steps right after their rollout count. `lag` is the mean number of optimizer steps since the sampler's weights, by
    token. With an environment, `turns` is a mean, and `faults/KIND` counts the step's faults.
    """

    rewards: Every[Reward] = attrs.field(factory=Every)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Sums over completions, tokens and groups, and one maximum."""
        rewards = Accumulator(shape=(2, len(self.rewards)), scope="rows")
        sums = {name: Accumulator(scope="rows") for name in SUMS}
        faults = Accumulator(shape=(len(FAULTS),), scope="rows")
        return {**sums, "rewards": rewards, "faults": faults, LARGEST_DIFFERENCE: Accumulator("max")}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return the sums over this rank's completions."""
        values: dict[str, Tensor] = {}
        rollouts, losses = step.state.get("rollouts", []), read_losses_on_last_stage(step)
        for scored in rollouts:
            for name, value in _sum_over_completions(scored, [*self.rewards], step.index).items():
                values[name] = values[name] + value if name in values else value
        is_fresh = all(scored.age == 0 for scored in rollouts)
        if losses is not None and is_fresh and LARGEST_DIFFERENCE in losses["sums"]:
            values[LARGEST_DIFFERENCE] = losses["sums"][LARGEST_DIFFERENCE].max()
        return values

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the means; None for a mean over nothing."""
        rows = totals["rows"]
        values = {
            "reward": _mean_or_none(totals["reward"], totals["scored"]),
            "length": _mean_or_none(totals["tokens"], rows),
            "entropy": _mean_or_none(totals["entropy"], totals["tokens"]),
            "truncated": _mean_or_none(totals["truncated"], rows),
            "unscored": _mean_or_none(rows - totals["scored"], rows),
            "equal_groups": _mean_or_none(totals["equal"], totals["groups"]),
            "lag": _mean_or_none(totals["lag"], totals["tokens"]),
            "stale": _mean_or_none(totals["stale"], rows),
        }
        if totals["turns"] > 0:
            counts = zip(FAULTS, totals["faults"].tolist(), strict=True)
            values |= {"turns": float(totals["turns"] / rows), **{f"faults/{kind}": count for kind, count in counts}}
        if len(self.rewards) > 1:
            means = zip(self.rewards, *totals["rewards"], strict=True)
            values |= {f"reward/{name}": _mean_or_none(total, count) for name, total, count in means}
        largest = totals[LARGEST_DIFFERENCE]
        return values | {"sampler_difference": float(largest) if largest.isfinite() else None}


def _sum_over_completions(scored: Scored, rewards: Sequence[str], step: int) -> dict[str, Tensor]:
    """Return the sums over a microbatch's completions, by name."""
    scores = scored.scores[:, [scored.names.index(name) for name in rewards]]
    completions, groups = scored.completions, scored.totals.view(-1, scored.group_size)
    is_scored = ~groups.isnan()
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return {
        "rows": torch.tensor(float(groups.numel())),
        "scored": is_scored.sum(),
        "reward": groups.nansum(),
        "tokens": completions.sampled_counts.sum(),
        "entropy": completions.entropies.double().sum(),
        "truncated": (~completions.is_ended).sum(),
        "groups": torch.tensor(float(len(groups))),
        "equal": (high <= low).sum(),
        "turns": completions.turns.sum(),
        "faults": completions.faults.sum(0).double(),
        "lag": (step - 1 - completions.versions)[completions.is_sampled].sum(),
        "stale": scored.is_stale.sum(),
        "rewards": torch.stack([scores.nansum(0), (~scores.isnan()).sum(0).double()]),
    }


def _mean_or_none(total: Tensor, count: Tensor) -> float | None:
    """Return total / count as a float, or None if the count is 0."""
    return float(total / count) if count > 0 else None
