"""The common warm-up of learning rate schedules."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from drawloom import Problem, at_least, between, setting
from drawloom.components.learning_rate.lengths import (
    convert_length_to_steps,
    create_token_counts,
    create_token_counts_unless_ramped,
    report_missing_batch_or_rows_edge,
)
from drawloom.components.learning_rate.piecewise import Curve, FactorSchedule, interpolate
from drawloom.graph import component_base_class

LENGTHS = ("warmup", "decay")

UNITS = ("steps", "tokens", "percent")

SHORTEN = "make it shorter, for example {name}_percent = 10.0, or raise `steps` of the trainer"


@component_base_class
class AfterWarmup(FactorSchedule):
    """
    Learning rate schedule that rises linearly from `start` to 1, and then follows a curve.

    A warm-up's first step has the factor `start`, and the step after the warm-up 1. A length in tokens needs
    `batching = "@batch"` and `rows = "@packing"`, and ends with the step at which the tokens are reached.
    """

    has_fixed_end: ClassVar[bool] = True
    """Whether the curve ends at the run's last step."""

    start: float | None = setting(
        "learning-rate multiplier at the first step; default: 1 / warm-up steps; 0, as in transformers, trains "
        "nothing in this step",
        default=None,
        check=between(0, 1),
    )
    warmup_steps: int | None = setting("warm-up length in steps", default=None, check=at_least(0), one_of="warmup")
    warmup_tokens: int | None = setting(
        "warm-up length in tokens, counted in full rows", default=None, check=at_least(0), one_of="warmup"
    )
    warmup_percent: float | None = setting(
        "warm-up length as a percentage of all steps; without any length there is no warm-up",
        default=None,
        check=between(0, 100),
        one_of="warmup",
    )

    def factor(self, done: int, total: int) -> float:
        """Return the factor after `done` out of `total` steps."""
        warmup = self.count_warmup_steps(total)
        if done < warmup:
            start = 1 / warmup if self.start is None else self.start
            return start + (1 - start) * done / warmup
        return self.factor_after_warmup(done - warmup, max(total - warmup, 1), total)

    def count_warmup_steps(self, total: int) -> int:
        """Return the warm-up length in steps, in a run with `total` steps."""
        return convert_length_to_steps(
            self.warmup_steps,
            self.warmup_tokens,
            self.warmup_percent,
            total=total,
            sizes=self.run_token_counts,
            at_end=False,
        )

    @abstractmethod
    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return the factor after `steps_done` out of all `steps_after_warmup`, in a run with `total` steps."""

    @classmethod
    def depends_on_total_steps(cls, node: Any) -> bool:
        """Return whether another step count would change any step's factor."""
        return cls.has_fixed_end or node.settings["warmup_percent"] is not None

    @classmethod
    def check_total_steps(cls, node: Any, total: int) -> Iterator[Problem]:
        """Report a warm-up longer than the run, and a decay longer than the rest of the run."""
        names = [name for name in LENGTHS if f"{name}_steps" in node.settings]
        steps = {name: _convert_setting_to_steps(node, name, total, at_end=name == "decay") for name in names}
        if steps["warmup"] > total:
            text = f"the warm-up takes {steps['warmup']} steps, and the run has {total}"
            yield node.problem(_find_length_key(node, "warmup"), text, SHORTEN.format(name="warmup"))
        elif sum(steps.values()) > total:
            text = f"the warm-up takes {steps['warmup']} steps and the decay {steps['decay']}, and the run has {total}"
            yield node.problem(_find_length_key(node, "decay"), text, SHORTEN.format(name="decay"))

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Report lengths in tokens without the batch size and sequence length."""
        for name in LENGTHS:
            if node.settings.get(key := f"{name}_tokens") is not None:
                yield from report_missing_batch_or_rows_edge(node, key, key)


@component_base_class
class DecayToEnd(AfterWarmup):
    """Learning rate schedule that follows a curve from 1 to `end` after the warm-up."""

    curve: ClassVar[Curve]

    end: float = setting("learning-rate multiplier after the last step", default=0.0, check=at_least(0))

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return the curve's value at `steps_done`."""
        return interpolate(self.curve, 1.0, self.end, min(steps_done / steps_after_warmup, 1.0))


def _convert_setting_to_steps(node: Any, name: str, total: int, *, at_end: bool) -> int:
    """Return a length in steps from a node's settings; 0 for tokens whose step is known only in the run."""
    steps, tokens, percent = (node.settings[f"{name}_{unit}"] for unit in UNITS)
    sizes = create_token_counts_unless_ramped(node)
    if sizes is None and tokens is not None:
        return 0
    return convert_length_to_steps(
        steps, tokens, percent, total, sizes or create_token_counts(None, None), at_end=at_end
    )


def _find_length_key(node: Any, name: str) -> str:
    """Return the key under which a length is set, such as `warmup_steps` for "warmup"."""
    return next(key for unit in UNITS if node.settings[key := f"{name}_{unit}"] is not None)
