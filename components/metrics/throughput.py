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

    Padding is no token. Seconds that are excluded from a step, such as evaluations, don't count.
    """

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}
    _tokens: int = attrs.field(init=False, default=0)
    _measured: Step | None = attrs.field(init=False, default=None)
    _seconds: float = attrs.field(init=False, default=0.0)

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self._counted()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved count."""
        self._tokens, self._measured = int(state["tokens"]), None

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Read the clock; on a GPU the host learns the tokens of all ranks later."""
        self._counted()
        self._measured, self._seconds = step, self.clock() - step.started - step.excluded_seconds
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Count the step's tokens, which are those of all ranks already."""
        return {"tokens": self._counted(), "tokens_per_second": step.tokens / max(self._seconds, SHORTEST)}

    def _counted(self) -> int:
        """The tokens so far, those of the step that was measured last included."""
        measured, self._measured = self._measured, None
        if measured is not None:
            self._tokens += measured.tokens
        return self._tokens
