"""
Effective training time ratio (ETTR): seconds in productive steps, divided by seconds since the run's start.

Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025, section II-D. A
step is productive if its update is still in the run's weights. A resume removes steps lost by a kill from
`metrics.jsonl`. All other time counts against the ratio: starts, evaluations, saves, lost steps, and the time between
processes, which are in the log.
"""

from datetime import datetime, timedelta

import attrs

from drawloom.components.report.events import RunLog
from drawloom.components.report.metrics import Metrics

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


@attrs.frozen
class Ettr:
    """Seconds in a run's productive steps, seconds between its first and last message, and lost step count."""

    learned: float
    wall: float
    lost_steps: int
    processes: int

    @property
    def productive_time_fraction(self) -> float:
        """Productive time fraction, at most 1."""
        return min(1.0, self.learned / self.wall)  # the log rounds times to seconds

    def __str__(self) -> str:
        learned, wall = (timedelta(seconds=round(seconds)) for seconds in (self.learned, self.wall))
        lost = f", {self.lost_steps:,} steps lost and done again" if self.lost_steps else ""
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        share = f"{self.productive_time_fraction:.1%} in steps that count"
        return f"{share}: {learned} of {wall} since the start{processes}{lost}"


def compute_ettr(log: RunLog, metrics: Metrics) -> Ettr | None:
    """Compute a run's ratio from its log and metrics; None if they lack times or steps."""
    if not log.first or not len(metrics.steps) or metrics.total_seconds_by_step[-1] <= 0:
        return None
    first, last = (datetime.strptime(time, TIME_FORMAT) for time in (log.first, log.last))
    if (wall := (last - first).total_seconds()) <= 0:
        return None
    return Ettr(float(metrics.total_seconds_by_step[-1]), wall, log.lost, log.starts)
