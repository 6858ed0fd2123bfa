"""Tokens, and tokens per second."""

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
from torch import Tensor

from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component

SHORTEST = 1e-9  # seconds; a coarse clock may give one time twice


@component(impact="safe")
class Throughput:
    """
    `tokens` since the beginning of the run, those of skipped steps included, and `tokens_per_second` of the step.

    Seconds that are excluded from a step, such as evaluations, don't count.
    """

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}
    _tokens: int = attrs.field(init=False, default=0)
    _last: Mapping[str, Value] = attrs.field(init=False, factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self._tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved count."""
        self._tokens = int(state["tokens"])

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Count the step's tokens, which are those of all ranks already, and read the clock."""
        self._tokens += step.tokens
        seconds = self.clock() - step.started - step.excluded_seconds
        self._last = {"tokens": self._tokens, "tokens_per_second": step.tokens / max(seconds, SHORTEST)}
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """What was counted."""
        return self._last
