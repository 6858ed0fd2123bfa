"""Token count, and tokens per second."""

from drawloom import component, internal
from drawloom.ports import Metric, MetricTotals, MetricValues, NodeState, Step


@component(impact="safe")
class Throughput(Metric):
    """
    `tokens` since the run's beginning, including skipped steps, and `tokens_per_second` in the step.

    Padding does not count as tokens. The seconds are the time of the slowest rank from one report to the next, without
    evaluations, replays and saving.
    """

    _tokens: int = internal(0)
    _measured: Step | None = internal(None)

    def state_dict(self) -> NodeState:
        """Return the token count so far."""
        return {"tokens": self._add_tokens_of_last_step()}

    def load_state_dict(self, state: NodeState) -> None:
        """Continue from a saved count."""
        self._tokens, self._measured = int(state["tokens"]), None

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Remember the step; return nothing to sum, because `tokens` is summed over ranks already."""
        self._add_tokens_of_last_step()
        self._measured = step
        return {}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values; there is no rate without an interval."""
        rate = step.tokens / step.interval.training_seconds if step.interval else None
        return {"tokens": self._add_tokens_of_last_step(), "tokens_per_second": rate}

    def _add_tokens_of_last_step(self) -> int:
        """Add the last measured step's tokens once, and return the token count so far."""
        measured, self._measured = self._measured, None
        if measured is not None:
            self._tokens += measured.tokens
        return self._tokens
