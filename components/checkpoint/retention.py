"""Retention: which checkpoints are kept, and which have expired."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

from drawloom.components.checkpoint.manifest import CorruptCheckpoint, committed, quick_check, step_of, verify

log = logging.getLogger("drawloom.checkpoint")

Values = Mapping[str, float | None]
"""The numbers of a step; None for one that is not finite."""


@attrs.frozen
class RetentionPolicy:
    """Kept are the newest `keep`, multiples of `every`, and the one whose number `best` is lowest or highest."""

    keep: int
    every: int | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"

    def counting(self, candidates: Mapping[int, Values]) -> set[int]:
        """
        Steps that are kept for now: the newest, the best, and the newest one whose loss is finite.

        If one of them is damaged, a good one would be removed in its place, so each has to be verified.
        """
        steps = sorted(candidates)
        sane = [step for step in steps if candidates[step].get("loss", 0.0) is not None]
        return {*steps[-self.keep :], *sane[-1:], *self._best(candidates)}

    def for_ever(self, candidates: Mapping[int, Values]) -> set[int]:
        """Steps that never expire."""
        return {step for step in candidates if self.every is not None and step % self.every == 0}

    def _best(self, candidates: Mapping[int, Values]) -> list[int]:
        """At most one step; of equals the newest."""
        sign = -1 if self.best_is == "lowest" else 1
        numbers = {step: None if self.best is None else values.get(self.best) for step, values in candidates.items()}
        known = [(sign * number, step) for step, number in numbers.items() if number is not None]
        return [max(known)[1]] if known else []


class Retention:
    """
    Finds expired checkpoints. A damaged one neither counts nor expires: older ones are removed only for the sake of
    newer ones that this process has committed or verified.
    """

    def __init__(self, rules: RetentionPolicy) -> None:
        self._rules = rules
        self._whole: dict[Path, Values] = {}
        self._damaged: set[Path] = set()

    def mark_valid(self, checkpoint: Path, values: Values) -> None:
        """Note that a checkpoint is valid."""
        self._whole[checkpoint] = values
        self._damaged.discard(checkpoint)

    def mark_invalid(self, checkpoint: Path) -> None:
        """Note that a checkpoint is damaged."""
        self._damaged.add(checkpoint)
        self._whole.pop(checkpoint, None)

    def expired(self, checkpoints: Path, saved: Path) -> list[Path]:
        """The expired checkpoints among those up to the one that was just saved, oldest first."""
        while True:
            values = self._candidates(checkpoints, saved)
            counting = self._rules.counting(values)
            stay = counting | self._rules.for_ever(values)
            expired = [checkpoints / f"step-{step}" for step in values if step not in stay]
            newer = [checkpoints / f"step-{step}" for step in values if step in counting]
            unsure = [path for path in newer if path not in self._whole]
            if not expired or not unsure:
                return expired
            for path in unsure:  # reads the whole checkpoint, so only when something would be removed for its sake
                self._verify(path)

    def _candidates(self, checkpoints: Path, saved: Path) -> dict[int, Values]:
        """Step to values of the checkpoints that are valid as far as is known."""
        found: dict[int, Values] = {}
        for path in committed(checkpoints):
            if path in self._whole:
                found[step_of(path)] = self._whole[path]
            elif path not in self._damaged and (manifest := quick_check(path)):
                found[step_of(path)] = manifest.values
        return {step: values for step, values in found.items() if step <= step_of(saved)}

    def _verify(self, path: Path) -> None:
        try:
            self.mark_valid(path, verify(path).values)
        except CorruptCheckpoint as error:
            log.warning("%s is damaged, and is not counted: %s", path, error)
            self.mark_invalid(path)
