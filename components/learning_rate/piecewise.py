"""Learning rate schedule with consecutive phases."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import attrs

from drawloom import Problem, above, at_least, component, setting
from drawloom.components.learning_rate.lengths import (
    TokenCounts,
    create_token_counts,
    create_token_counts_unless_ramped,
    report_missing_batch_or_rows_edge,
)
from drawloom.graph import component_base_class
from drawloom.ports import Batching, PackedDataset, Step

Curve = Literal["linear", "cosine", "polynomial", "exponential"]

MIN_FACTOR = 1e-8
"""Replaces 0 at the ends of an exponential curve, which can't reach 0."""


def interpolate(curve: Curve, start: float, end: float, progress: float, power: float = 2.0) -> float:
    """Return a curve's value at `progress` from 0 to 1; `power` is the polynomial's exponent."""
    match curve:
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
        case "polynomial":
            return start + (end - start) * math.pow(progress, power)
        case "exponential":
            low, high = math.log(max(start, MIN_FACTOR)), math.log(max(end, MIN_FACTOR))
            return math.exp(low + (high - low) * progress)


@attrs.frozen(kw_only=True)
class SchedulePiece:
    """Schedule phase: a curve from the previous phase's end value to `to`."""

    to: float = setting("learning-rate multiplier at the phase's end", check=at_least(0))
    curve: Curve = setting("curve to the end value", default="linear")
    steps: int | None = setting("phase length in steps", default=None, check=at_least(0))
    until_tokens: int | None = setting(
        "tokens, in full rows, from the run's start to the phase's end", default=None, check=at_least(1)
    )
    until_percent: float | None = setting("end of the phase as a percentage of all steps, 0 to 100", default=None)
    power: float = setting("exponent for a polynomial curve", default=2.0, check=above(0))

    def compute_end_step(self, begin: int, total: int, sizes: TokenCounts) -> int:
        """Return the first step, from 0, after the phase; for a phase in steps it depends on `begin`."""
        if self.steps is not None:
            return begin + self.steps
        if self.until_tokens is not None:
            return sizes.count_steps_to_reach(self.until_tokens)
        return total if self.until_percent is None else int(total * self.until_percent / 100)


@component_base_class
class FactorSchedule:
    """Base of learning rate schedules: a factor for every step."""

    batching: Batching | None = None
    rows: PackedDataset | None = None

    def run_phase(self, step: Step) -> None:
        """Write `lr_factor`, which multiplies the base learning rate."""
        step.state["lr_factor"] = self.factor(step.index - 1, step.total)

    @cached_property
    def run_token_counts(self) -> TokenCounts:
        """The run's token counts."""
        return create_token_counts(self.batching, self.rows)

    @abstractmethod
    def factor(self, done: int, total: int) -> float:
        """Return the factor after `done` out of `total` steps."""


@component(writes=("lr_factor",))
class Piecewise(FactorSchedule):
    """
    Schedule with consecutive phases; after the last phase, the factor stays at its end value.

    Phases with `until_tokens` need `batching = "@batch"` and `rows = "@packing"`.
    """

    start: float | None = setting(
        "learning-rate multiplier at the first step; default: the first phase's `to` / its steps",
        default=None,
        check=at_least(0),
    )
    phases: list[SchedulePiece] = setting(
        "phases in order, with steps, until_tokens or until_percent; without any the last phase takes the rest"
    )

    def factor(self, done: int, total: int) -> float:
        """Return the factor after `done` out of `total` steps."""
        value, begin = self.start, 0
        for phase in self.phases:
            end = max(begin, phase.compute_end_step(begin, total, self.run_token_counts))
            value = phase.to / max(end, 1) if value is None else value
            if done < end:
                return interpolate(phase.curve, value, phase.to, (done - begin) / (end - begin), phase.power)
            value, begin = phase.to, end
        return value or 0.0

    @classmethod
    def depends_on_total_steps(cls, node: Any) -> bool:
        """Return whether another step count would change any step's factor."""
        value, floating = node.settings["start"], False
        for phase in node.settings["phases"]:
            # a percentage or the rest ends at a step that depends on the number of steps; so do all later phases
            floating |= phase.steps is None and phase.until_tokens is None
            if floating and phase.to != value:
                return True
            value = phase.to
        return False

    @classmethod
    def check_total_steps(cls, node: Any, total: int) -> Iterator[Problem]:
        """Report the first phase that ends before it begins, or after the run."""
        if any(cls.constraints(node)):
            return
        begin, sizes = 0, create_token_counts_unless_ramped(node)
        for number, phase in enumerate(node.settings["phases"]):
            if phase.until_tokens is not None and sizes is None:
                return  # the last steps of this phase and all later ones are known only in the run
            end = phase.compute_end_step(begin, total, sizes or create_token_counts(None, None))
            if end < begin:
                text = f"phases[{number}] ends after step {end}, before it begins: the phases before it take {begin}"
                yield node.problem(("phases", number), text, "make the phases before it shorter, or let it end later")
                return
            if end > total:
                text = f"phases[{number}] ends after step {end}, and the run has {total}"
                hint = "make it shorter, for example until_percent = 100.0, or raise `steps` of the trainer"
                yield node.problem(("phases", number), text, hint)
                return
            begin = end

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Report percentages that do not rise, and phases after a phase with all remaining steps."""
        phases: list[SchedulePiece] = node.settings["phases"]
        if not phases:
            yield node.problem("phases", "phases is empty", "write at least one phase, such as { to = 1.0 }")
        reached = 0.0
        for number, phase in enumerate(phases):
            if phase.until_tokens is not None:
                key, text = ("phases", number), f"phases[{number}].until_tokens"
                yield from report_missing_batch_or_rows_edge(node, key, text)
            for text, hint in _find_piece_faults_and_remedies(phase, reached, last=number == len(phases) - 1):
                yield node.problem(("phases", number), f"phases[{number}] {text}", hint)
            reached = reached if phase.until_percent is None else phase.until_percent


def _find_piece_faults_and_remedies(phase: SchedulePiece, reached: float, *, last: bool) -> Iterator[tuple[str, str]]:
    percent = phase.until_percent
    keys = [name for name in ("steps", "until_tokens", "until_percent") if getattr(phase, name) is not None]
    if len(keys) > 1:
        yield f"has both {keys[0]} and {keys[-1]}", "leave one of them out"
    if not keys and not last:
        yield "has no end, so the phases after it never start", "set steps or until_percent, or make it the last"
    if percent is not None and not reached <= percent <= 100:
        hint = "write at most 100" if percent > 100 else "phases end in order: write a larger percentage"
        yield f"ends at {percent:g} %, which is not from {reached:g} to 100", hint
