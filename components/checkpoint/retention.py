"""Checkpoint retention: the choice between keeping and expiring."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

from drawloom.components.checkpoint.manifest import (
    CorruptCheckpointError,
    list_checkpoints,
    read_manifest_if_sizes_match,
    step_of_checkpoint,
    verify_checkpoint,
)

log = logging.getLogger("drawloom.checkpoint")

Values = Mapping[str, float | None]
"""Metrics of a step; None for a value that is not finite."""


@attrs.define(eq=False)
class Retention:
    """
    Finder for expired checkpoints: keeps the newest `keep`, multiples of `every`, and the lowest or highest `best`.

    A corrupt checkpoint neither counts nor expires: a checkpoint expires only if this process has committed or
    verified its newer or better replacements.
    """

    keep: int
    every: int | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"
    _valid: dict[Path, Values] = attrs.field(init=False, factory=dict)
    _corrupt: set[Path] = attrs.field(init=False, factory=set)

    def steps_to_keep_for_now(self, candidates: Mapping[int, Values]) -> set[int]:
        """
        Return the steps to keep until better or newer ones exist: the newest, the best (the newest among equals), and
        the newest with a finite loss.

        All must be verified: in exchange for a corrupt checkpoint, a valid one would be removed.
        """
        steps = sorted(candidates)
        finite = [step for step in steps if candidates[step].get("loss", 0.0) is not None]
        sign = -1 if self.best_is == "lowest" else 1
        numbers = {step: None if self.best is None else values.get(self.best) for step, values in candidates.items()}
        known = [(sign * number, step) for step, number in numbers.items() if number is not None]
        return {*steps[-self.keep :], *finite[-1:], *([max(known)[1]] if known else [])}

    def steps_to_keep_forever(self, candidates: Mapping[int, Values]) -> set[int]:
        """Return the steps that never expire."""
        return {step for step in candidates if self.every is not None and step % self.every == 0}

    def remember_as_valid(self, checkpoint: Path, values: Values) -> None:
        """Record a valid checkpoint."""
        self._valid[checkpoint] = values
        self._corrupt.discard(checkpoint)

    def remember_as_corrupt(self, checkpoint: Path) -> None:
        """Record a corrupt checkpoint."""
        self._corrupt.add(checkpoint)
        self._valid.pop(checkpoint, None)

    def verify_kept_and_select_expired(self, checkpoints: Path, saved: Path) -> list[Path]:
        """Return the expired checkpoints up to the newest save, oldest first."""
        while True:
            values = self._list_candidates(checkpoints, saved)
            temporary = self.steps_to_keep_for_now(values)
            kept = temporary | self.steps_to_keep_forever(values)
            expired = [checkpoints / f"step-{step}" for step in values if step not in kept]
            replacements = [checkpoints / f"step-{step}" for step in values if step in temporary]
            unverified = [path for path in replacements if path not in self._valid]
            if not expired or not unverified:
                return expired
            # verifying reads whole checkpoints, so it is done only before a removal
            for path in unverified:
                try:
                    self.remember_as_valid(path, verify_checkpoint(path).values)
                except CorruptCheckpointError as error:
                    log.warning("%s is corrupt, and not counted among those that are kept: %s", path, error)
                    self.remember_as_corrupt(path)

    def _list_candidates(self, checkpoints: Path, saved: Path) -> dict[int, Values]:
        """Return the metrics by step in checkpoints up to `saved`, except corrupt or incomplete ones."""
        candidates: dict[int, Values] = {}
        for path in list_checkpoints(checkpoints):
            if path in self._valid:
                candidates[step_of_checkpoint(path)] = self._valid[path]
            elif path not in self._corrupt and (manifest := read_manifest_if_sizes_match(path)):
                candidates[step_of_checkpoint(path)] = manifest.values
        return {step: values for step, values in candidates.items() if step <= step_of_checkpoint(saved)}
