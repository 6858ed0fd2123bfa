"""Reward by a conversation's environment."""

from collections.abc import Sequence

from drawloom import component, setting
from drawloom.components.rewards.expected import Weighted
from drawloom.ports import Answer


@component
class EnvironmentReward(Weighted):
    """Sum over the environment's rewards in a conversation; None without any."""

    cut: float | None = setting(
        "reward for a conversation cut at its length or turns; default: the environment's", default=None
    )
    by_fault: float = setting("added for every fault, such as a tool's error; negative for a penalty", default=0.0)

    def scores(self, answers: Sequence[Answer]) -> list[float | None]:
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> float | None:
        reward = self.cut if self.cut is not None and not answer.is_ended else answer.reward
        penalty = self.by_fault * answer.faults
        return reward if not penalty else (reward or 0.0) + penalty
