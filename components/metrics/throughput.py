"""Tokens, and tokens per second."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from drawloom.components.ports.run import Step, Value
from drawloom.graph import component

SHORTEST = 1e-9  # seconds; a coarse clock may give one time twice


@component(change="free")
class Throughput:
    """
    `tokens` since the beginning of the run, those of skipped steps included, and `tokens_per_second` of the step.

    Seconds that are excluded from a step, such as evaluations, don't count.
    """

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    _tokens: int = attrs.field(init=False, default=0)

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self._tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved count."""
        self._tokens = int(state["tokens"])

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Count the step's tokens, over all ranks."""
        self._tokens += step.tokens
        seconds = self.clock() - step.started - step.excluded_seconds
        return {"tokens": self._tokens, "tokens_per_second": step.tokens / max(seconds, SHORTEST)}
