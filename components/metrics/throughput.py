"""Token count, and tokens per second."""

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
from torch import Tensor

from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Accumulator, Value
from drawloom.graph import component

MIN_SECONDS = 1e-9  # a coarse clock may return the same time twice


@component(impact="safe")
class Throughput:
    """
    `tokens` since the run's beginning, including skipped steps, and `tokens_per_second` in the step.

    Padding does not count as tokens. Seconds excluded from a step, such as evaluations, do not count.
    """

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}
    _tokens: int = attrs.field(init=False, default=0)
    _measured: Step | None = attrs.field(init=False, default=None)
    _seconds: float = attrs.field(init=False, default=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the token count so far."""
        return {"tokens": self._add_tokens_of_last_step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved count."""
        self._tokens, self._measured = int(state["tokens"]), None

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        """Remember the step and its seconds; return nothing to sum, because `tokens` is summed over ranks already."""
        self._add_tokens_of_last_step()
        self._measured, self._seconds = step, self.clock() - step.started - step.excluded_seconds
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the values; `step.tokens` is a sum over ranks already."""
        return {
            "tokens": self._add_tokens_of_last_step(),
            "tokens_per_second": step.tokens / max(self._seconds, MIN_SECONDS),
        }

    def _add_tokens_of_last_step(self) -> int:
        """Add the last measured step's tokens once, and return the token count so far."""
        measured, self._measured = self._measured, None
        if measured is not None:
            self._tokens += measured.tokens
        return self._tokens
