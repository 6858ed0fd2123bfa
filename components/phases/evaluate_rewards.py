"""Evaluation by rewards: the policy completes held-out prompts."""

import time

import attrs

from drawloom.components.phases.rollout import repeat_prompts, require_prompts, score_completions, sum_and_count_totals
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.data import ValidationData
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.rollouts import Reward, Rollouts
from drawloom.components.ports.run import Batching, Cadence, Step, check_cadence, is_due
from drawloom.components.ports.stages import AveragedWeights, use_averages_if_any
from drawloom.graph import Every, between, component, setting


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
    rewards: Every[Reward] = attrs.field(factory=Every)
    average: AveragedWeights | None = None
    samples: int = setting(default=4, check=between(1, 10_001), doc="completions of each prompt")
    every: Cadence = setting(default=20, check=check_cadence, doc='steps between evaluations, or "last" or "never"')
    at_start: bool = setting(default=True, doc="whether a new run also evaluates before its first step")

    _copy: Group = attrs.field(init=False, default=None)
    _initial: float | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def after_restore(self, done: int) -> None:
        """Evaluate a new run's initial weights."""
        if self.at_start and self.every != "never":
            self._initial = self._measure_mean_reward() if done == 0 else None

    def run_phase(self, step: Step) -> None:
        """Write `validation_reward` at `every`'s steps; a new run's first step gets `initial_validation_reward`."""
        if self._initial is not None:
            step.state["initial_validation_reward"], self._initial = self._initial, None
        if not is_due(self.every, step):
            return
        began = time.monotonic()
        if (reward := self._measure_mean_reward()) is not None:
            step.state["validation_reward"] = reward
        step.excluded_seconds += time.monotonic() - began

    def _measure_mean_reward(self) -> float | None:
        """Return the mean reward; None if no completion has one. A collective."""
        batches = [require_prompts(batch) for batch in self.data.batches()]
        prompts, row = [], 0
        for batch in batches:
            numbers = [self.batching.dp_rank + self.batching.dp_size * (row + n) for n in range(batch.row_count)]
            prompts.append(repeat_prompts(batch, numbers, self.samples))
            row += batch.row_count
        if not batches:
            return None
        with use_averages_if_any(self.average):
            completions = self.rollouts.sample(prompts, "validation", 0)
        scored = [
            score_completions(self.rewards, self.tokenizer, self._copy, batch, sampled, self.samples)
            for batch, sampled in zip(batches, completions, strict=True)
        ]
        sums = sum_and_count_totals(scored)
        self.mesh.data_group.sum(sums)
        total, count = sums.tolist()
        return total / count if count else None
