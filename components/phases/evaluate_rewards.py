"""Evaluation by rewards: the policy completes held-out prompts."""

from collections.abc import Iterable, Sequence
from itertools import islice

import attrs
import torch
from torch import Tensor

from drawloom import Every, between, component, internal, setting
from drawloom.components.phases.rollout import repeat_prompts, require_prompts, score_completions_on_first_rank
from drawloom.ports import (
    AveragedWeights,
    Batch,
    Batching,
    Cadence,
    Device,
    Group,
    Mesh,
    PromptBatch,
    Reward,
    RewardMeans,
    Rollouts,
    Step,
    Tokenizer,
    ValidationData,
    describe_cadence_fault,
    exclude_from_rates,
    is_due,
    use_averages_if_any,
)

MAX_SAMPLED = 16
"""Microbatches per sampler call."""


@component(reads=("weights",), writes=("validation_reward", "initial_validation_reward"), impact="safe")
class EvaluateRewards:
    """
    Mean reward of sampled completions of the validation prompts, with the same random numbers at each evaluation.

    Greedy completions would not measure what the policy learns, which is a distribution.
    """

    data: ValidationData
    rollouts: Rollouts
    tokenizer: Tokenizer
    batching: Batching
    mesh: Mesh
    device: Device
    rewards: Every[Reward] = attrs.field(factory=Every)
    average: AveragedWeights | None = None
    samples: int = setting("completions of each prompt", default=4, check=between(1, 10_001))
    every: Cadence = setting(
        'steps between evaluations, or "last" or "never"', default=20, check=describe_cadence_fault
    )
    at_start: bool = setting("whether a new run also evaluates before its first step", default=True)

    _copy: Group = internal(None)
    _initial: float | None = internal(None)

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def after_restore(self, restored_step: int) -> None:
        """Evaluate a new run's initial weights."""
        if self.at_start and self.every != "never":
            self._initial = self._measure_mean_reward_over_ranks() if restored_step == 0 else None

    def run_phase(self, step: Step) -> None:
        """Write `validation_reward` at `every`'s steps; a new run's first step gets `initial_validation_reward`."""
        if self._initial is not None:
            step.state["initial_validation_reward"], self._initial = self._initial, None
        if not is_due(self.every, step):
            return
        with exclude_from_rates(step, self.mesh, self.device.device):
            if (reward := self._measure_mean_reward_over_ranks()) is not None:
                step.state["validation_reward"] = reward

    def _measure_mean_reward_over_ranks(self) -> float | None:
        """Return the validation prompts' mean reward; None if no completion has one. A collective."""
        return self.sample_and_average_rewards(self.data.batches()).reward

    def sample_and_average_rewards(self, batches: Iterable[Batch]) -> RewardMeans:
        prompts, row = map(require_prompts, batches), 0
        sums = torch.zeros(5 + 2 * len(self.rewards), dtype=torch.float64)
        with use_averages_if_any(self.average):
            self.rollouts.update_weights("validation", 0)
            while loaded := [*islice(prompts, MAX_SAMPLED)]:
                sums += self._sample_and_sum_scores(loaded, row)
                row += sum(batch.row_count for batch in loaded)
        self.mesh.data_group.sum(sums)
        (completions, tokens, truncated, total, scored), by_reward = sums[:5].tolist(), sums[5:].view(-1, 2).tolist()
        return RewardMeans(
            completions=int(completions),
            reward=total / scored if scored else None,
            rewards={
                name: score / count if count else None
                for name, (score, count) in zip(self.rewards, by_reward, strict=True)
            },
            length=tokens / completions if completions else None,
            truncated=truncated / completions if completions else None,
        )

    def _sample_and_sum_scores(self, batches: Sequence[PromptBatch], first_row: int) -> Tensor:
        """
        Complete and score batches whose first prompt is this rank's `first_row`-th; return sums, float64.

        Sums are the completions, their tokens, the truncated ones, the rewards, and the completions with one; then for
        each reward its sum and number. Prompts without weight are left out.
        """
        prompts, row = [], first_row
        for batch in batches:
            numbers = [self.batching.dp_rank + self.batching.dp_size * (row + n) for n in range(batch.row_count)]
            prompts.append(repeat_prompts(batch, numbers, self.samples))
            row += batch.row_count
        sums = torch.zeros(5 + 2 * len(self.rewards), dtype=torch.float64)
        for batch, sampled in zip(batches, self.rollouts.sample(prompts, "validation", 0), strict=True):
            scored = score_completions_on_first_rank(
                self.rewards, self.tokenizer, self._copy, batch, sampled, self.samples
            )
            is_counted = batch.weights.repeat_interleave(self.samples) > 0
            scores = scored.scores[is_counted]
            sums[0] += is_counted.sum()
            sums[1] += sampled.sampled_counts[is_counted].sum()
            sums[2] += (~sampled.is_ended[is_counted]).sum()
            sums[3] += scored.totals.nansum()
            sums[4] += (~scored.totals.isnan()).sum()
            sums[5:] += torch.stack([scores.nansum(0), (~scores.isnan()).sum(0)], 1).flatten()
        return sums
