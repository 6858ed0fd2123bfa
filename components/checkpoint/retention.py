"""Which checkpoints stay, and which make room for newer ones."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs

from drawloom.components.checkpoint.manifest import CorruptCheckpoint, quick_check, read_manifest, verify
from drawloom.components.checkpoint.reader import committed, step_of
from drawloom.graph import UserError

log = logging.getLogger("drawloom.checkpoint")

Values = Mapping[str, float | None]
"""The numbers that a step left behind; None for one that is not finite."""


@attrs.frozen
class RetentionPolicy:
    """The newest `keep` stay, every step that `every` divides, and the one in which `best` is lowest or highest."""

    keep: int
    every: int | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"

    def counting(self, candidates: Mapping[int, Values]) -> set[int]:
        """
        Steps that stay as long as they are among the newest, the best, or the newest one whose loss is finite.

        Whichever of them is damaged keeps a good one from its place.
        """
        steps = sorted(candidates)
        sane = [step for step in steps if candidates[step].get("loss", 0.0) is not None]
        return {*steps[-self.keep :], *sane[-1:], *self._best(candidates)}

    def for_ever(self, candidates: Mapping[int, Values]) -> set[int]:
        """Steps that stay whatever comes."""
        return {step for step in candidates if self.every is not None and step % self.every == 0}

    def _best(self, candidates: Mapping[int, Values]) -> list[int]:
        """At most one; of equals the newest."""
        sign = -1 if self.best_is == "lowest" else 1
        numbers = {step: None if self.best is None else values.get(self.best) for step, values in candidates.items()}
        known = [(sign * number, step) for step, number in numbers.items() if number is not None]
        return [max(known)[1]] if known else []


class Retention:
    """
    Removes checkpoints by rules. What is damaged neither counts nor goes: only those that this process has committed
    or verified keep older ones from staying.
    """

    def __init__(self, rules: RetentionPolicy) -> None:
        self._rules = rules
        self._whole: dict[Path, Values] = {}
        self._damaged: set[Path] = set()

    def mark_valid(self, checkpoint: Path, values: Values) -> None:
        """This one is whole."""
        self._whole[checkpoint] = values
        self._damaged.discard(checkpoint)

    def mark_invalid(self, checkpoint: Path) -> None:
        """This one is damaged."""
        self._damaged.add(checkpoint)
        self._whole.pop(checkpoint, None)

    def expired(self, checkpoints: Path, saved: Path) -> list[Path]:
        """Those up to the one that was just saved which may be removed, oldest first."""
        while True:
            paths = self._candidates(checkpoints, saved)
            values = {step_of(path): self._values(path) for path in paths}
            counting = self._rules.counting(values)
            gone = [path for path in paths if step_of(path) not in counting | self._rules.for_ever(values)]
            unsure = [path for path in paths if step_of(path) in counting and path not in self._whole]
            if not gone or not unsure:
                return gone
            for path in unsure:
                self._verify(path)

    def _candidates(self, checkpoints: Path, saved: Path) -> Sequence[Path]:
        paths = [path for path in committed(checkpoints) if step_of(path) <= step_of(saved)]
        return [path for path in paths if path not in self._damaged and (path in self._whole or quick_check(path))]

    def _values(self, path: Path) -> Values:
        try:
            return self._whole[path] if path in self._whole else read_manifest(path).values
        except (CorruptCheckpoint, UserError):
            return {}

    def _verify(self, path: Path) -> None:
        try:
            self.mark_valid(path, verify(path).values)
        except CorruptCheckpoint as error:
            log.warning("%s is damaged, and is not counted: %s", path, error)
            self.mark_invalid(path)
