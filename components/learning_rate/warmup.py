"""Shared by the schedules that rise first: for some steps, or a share of all."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from drawloom.components.ports.run import Step
from drawloom.graph import Problem, at_least, between, inherited, setting


@inherited
class AfterWarmup:
    """
    A factor of the learning rate that rises linearly from `start` to 1, and then follows a curve.

    As in transformers, the first step of a warm-up has the value at its start.
    """

    start: float = setting(default=0.0, check=between(0, 1), doc="the factor of the first step of the warm-up")
    warmup_steps: int | None = setting(default=None, check=at_least(0), doc="steps of the warm-up")
    warmup_percent: float | None = setting(
        default=None, check=between(0, 100), doc="the same as a share of all steps; there is none if both are left out"
    )

    def run_phase(self, step: Step) -> None:
        """Set the output `lr_factor` of this step."""
        step.outputs["lr_factor"] = self.factor(step.index - 1, step.total)

    def factor(self, done: int, total: int) -> float:
        """The factor after `done` of `total` steps."""
        rising = steps_of(self.warmup_steps, self.warmup_percent, total)
        if done < rising:
            return self.start + (1 - self.start) * done / rising
        return self.after(done - rising, max(total - rising, 1), total)

    @abstractmethod
    def after(self, done: int, rest: int, total: int) -> float:
        """The factor after `done` of the `rest` steps behind the warm-up; `total` are all."""

    @classmethod
    def derives_from_total(cls, node: Any) -> bool:
        """Whether another number of steps would change the factor of any step."""
        return True

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Either steps or a percentage."""
        yield from both_given(node, "warmup")


def steps_of(steps: int | None, percent: float | None, total: int) -> int:
    """A number of steps that is given as such, or as a percentage of all; 0 if neither is."""
    return steps if steps is not None else int(total * (percent or 0.0) / 100)


def both_given(node: Any, name: str) -> Iterator[Problem]:
    """A problem if both `<name>_steps` and `<name>_percent` are given."""
    if node.settings[f"{name}_steps"] is not None and node.settings[f"{name}_percent"] is not None:
        text = f"both {name}_steps and {name}_percent are given"
        yield node.problem(f"{name}_percent", text, "leave one of them out")
