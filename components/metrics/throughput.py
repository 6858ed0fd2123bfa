"""How fast the run learns."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from drawloom.components.ports.run import Step, Value
from drawloom.graph import component

SHORTEST = 1e-9  # seconds; a clock may stand still between two readings


@component(impact="safe")
class Throughput:
    """
    `tokens` since the beginning of the run, those of refused steps included, and `tokens_per_second` of the step.

    Seconds that went into something other than learning don't count.
    """

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    _tokens: int = attrs.field(init=False, default=0)

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self._tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._tokens = int(state["tokens"])

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Count the step's tokens, over all ranks."""
        self._tokens += step.tokens
        seconds = self.clock() - step.started - step.excluded_seconds
        return {"tokens": self._tokens, "tokens_per_second": step.tokens / max(seconds, SHORTEST)}
