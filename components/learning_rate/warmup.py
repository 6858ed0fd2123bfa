"""Shared by the schedules that rise first: for some steps, tokens, or a share of all."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from drawloom.components.learning_rate.lengths import (
    TokenCounts,
    declared_steps,
    several_given,
    steps_of,
    token_counts,
    tokens_without_sizes,
    unit_given,
)
from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Batching, Step
from drawloom.graph import Problem, at_least, between, inherited, setting

LENGTHS = ("warmup", "decay")

FEWER = "make it shorter, for example {name}_percent = 10.0, or raise `steps` of the trainer"


@inherited
class AfterWarmup:
    """
    A factor of the learning rate that rises linearly from `start` to 1, and then follows a curve.

    As in transformers, the first step of a warm-up has the value at its start. Lengths in tokens take
    `batching = "@batch"` and `rows = "@packing"`, and end with the step that reaches them.
    """

    batching: Batching | None = None
    rows: PackedDataset | None = None
    start: float = setting(default=0.0, check=between(0, 1), doc="the factor of the first step of the warm-up")
    warmup_steps: int | None = setting(default=None, check=at_least(0), doc="steps of the warm-up")
    warmup_tokens: int | None = setting(
        default=None, check=at_least(0), doc="the same as a number of tokens, counted in full rows"
    )
    warmup_percent: float | None = setting(
        default=None, check=between(0, 100), doc="the same as a share of all steps; there is none if all are left out"
    )

    def run_phase(self, step: Step) -> None:
        """Set the output `lr_factor` of this step."""
        step.state["lr_factor"] = self.factor(step.index - 1, step.total)

    def factor(self, done: int, total: int) -> float:
        """The factor after `done` of `total` steps."""
        rising = self.warmup(total)
        if done < rising:
            return self.start + (1 - self.start) * done / rising
        return self.after(done - rising, max(total - rising, 1), total)

    def warmup(self, total: int) -> int:
        """The steps of the warm-up, of `total` ones."""
        return steps_of(
            self.warmup_steps, self.warmup_tokens, self.warmup_percent, total=total, sizes=self.sizes, at_end=False
        )

    @property
    def sizes(self) -> TokenCounts:
        """The tokens of steps."""
        return token_counts(self.batching, self.rows)

    @abstractmethod
    def after(self, done: int, rest: int, total: int) -> float:
        """The factor after `done` of the `rest` steps behind the warm-up; `total` are all."""

    @classmethod
    def derives_from_total(cls, node: Any) -> bool:
        """Whether another number of steps would change the factor of any step."""
        return True

    @classmethod
    def check_total(cls, node: Any, total: int) -> Iterator[Problem]:
        """A warm-up fits the run, and a decay the steps after it."""
        names = [name for name in LENGTHS if f"{name}_steps" in node.settings]
        steps = {name: declared_steps(node, name, total, at_end=name == "decay") for name in names}
        if steps["warmup"] > total:
            text = f"the warm-up takes {steps['warmup']} steps, and the run has {total}"
            yield node.problem(unit_given(node, "warmup"), text, FEWER.format(name="warmup"))
        elif sum(steps.values()) > total:
            text = f"the warm-up takes {steps['warmup']} steps and the decay {steps['decay']}, and the run has {total}"
            yield node.problem(unit_given(node, "decay"), text, FEWER.format(name="decay"))

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Lengths are given in one unit, and those in tokens with the sizes of steps."""
        for name in LENGTHS:
            if f"{name}_steps" in node.settings:
                yield from several_given(node, name)
                if node.settings[key := f"{name}_tokens"] is not None:
                    yield from tokens_without_sizes(node, key, key)
