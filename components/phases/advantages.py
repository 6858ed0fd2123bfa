"""
Advantages of completions over others for the same prompt, and the batches to learn from.

Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, section 4.1 (GRPO: minus the group's mean, over its deviation); Liu
et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783 (Dr. GRPO: the mean alone); Ahmadian et al. 2024,
"Back to Basics", arXiv 2402.14740 (RLOO: the mean of the others); Yu et al. 2025, "DAPO", arXiv 2503.14476, section 3.2
(groups with equal rewards).
"""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from drawloom import component, setting
from drawloom.ports import IGNORE_INDEX, Batch, PolicyBatch, Scored, Step

EQUAL = 1e-6
"""Spread of a group's rewards up to which they are equal: sums of several rewards differ by rounding."""

STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL."""


@component(reads=("rollouts",), writes=("batches",))
class Advantages:
    """
    Advantage of every completion over its group's baseline, and the batches for the policy's loss.

    A completion without a score has weight 0, and does not count in its group's mean. A group of equal rewards has
    advantages of exactly 0, or without a baseline its rewards.
    """

    batch_type: ClassVar[type[Batch]] = PolicyBatch

    baseline: Literal["mean", "others", "none"] = setting(
        "subtracted from a reward: the group's mean, the mean of its other completions (RLOO), or 0", default="mean"
    )
    scale: Literal["none", "std"] = setting(
        "divisor of advantages: 1, or the group's standard deviation (GRPO), without bias", default="none"
    )
    equal_groups: Literal["keep", "drop"] = setting(
        "whether groups of equal rewards count in the loss's mean (dynamic sampling drops them)", default="keep"
    )
    truncated: Literal["keep", "drop"] = setting(
        "whether the policy learns from completions that were cut at the maximum length", default="keep"
    )

    def run_phase(self, step: Step) -> None:
        """Write a PolicyBatch for every microbatch."""
        scored: list[Scored] = step.state["rollouts"]
        step.state["batches"] = [self._make_policy_batch(part) for part in scored]

    def _make_policy_batch(self, scored: Scored) -> PolicyBatch:
        completions = scored.completions
        advantages, is_equal = compute_group_advantages(scored.totals, scored.group_size, self.baseline, self.scale)
        counts = ~scored.totals.isnan()
        if self.equal_groups == "drop":
            counts &= ~is_equal
        if self.truncated == "drop":
            counts &= completions.is_ended
        is_target = completions.is_target & counts[:, None]
        rows, length = completions.tokens.shape
        following = torch.cat([completions.tokens[:, 1:], torch.full((rows, 1), IGNORE_INDEX)], 1)
        arguments: dict[str, Any] = {
            "tokens": completions.tokens,
            "targets": following.where(is_target, IGNORE_INDEX),
            "positions": torch.arange(length).expand(rows, -1).contiguous(),
            "document_ids": torch.zeros_like(completions.tokens),
            "weights": is_target.float(),
            "logps": completions.logps.where(is_target, 0.0),
            "advantages": advantages.float()[:, None].where(is_target, 0.0),
            "temperature": None if scored.temperature == 1 else torch.tensor(scored.temperature),
            "padding": torch.arange(length) >= completions.ends[:, None],
        }
        return PolicyBatch(**arguments)


class GroupAdvantages(NamedTuple):
    """Advantages, float64 (rows,), 0 for rows without a reward; and whether a row's group has equal rewards."""

    advantages: Tensor
    has_equal_rewards: Tensor


def compute_group_advantages(total_rewards: Tensor, group_size: int, baseline: str, scale: str) -> GroupAdvantages:
    """
    Compare every reward with its group's rewards.

    total_rewards: float64 (rows,), NaN for rows without a reward; groups are `group_size` rows in succession.
    """
    groups = total_rewards.view(-1, group_size)
    is_scored = ~groups.isnan()
    counts = is_scored.sum(1, keepdim=True).double()
    means = groups.nansum(1, keepdim=True) / counts.clamp_min(1)
    centred = (groups - means).where(is_scored, 0.0)
    is_equal = centred.abs().amax(1, keepdim=True) <= EQUAL
    if baseline == "none":
        advantages = groups.where(is_scored, 0.0)
    else:
        centred = centred.masked_fill(is_equal, 0.0)
        # The mean of the others is counts / (counts - 1) times as far away as the mean.
        advantages = centred * counts / (counts - 1).clamp_min(1) if baseline == "others" else centred
    if scale == "std":
        std = (centred.square().sum(1, keepdim=True) / (counts - 1).clamp_min(1)).sqrt()
        advantages = advantages / (std + STD_FLOOR).masked_fill(is_equal, 1.0)
    return GroupAdvantages(advantages.flatten(), is_equal.expand_as(groups).flatten())
