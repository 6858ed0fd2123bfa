"""
The effective training time ratio (ETTR) of a run: seconds in which it has learned, over seconds since it began.

Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025, section II-D. A
step has learned if the run's weights still have it: `metrics.jsonl` ends where the newest resume began, so that steps
which a kill has lost are not in it. All else counts against it: starts, evaluations, saves, lost steps, and the time
between processes, which the log of all of them tells.
"""

from datetime import datetime, timedelta

import attrs

from drawloom.components.report.events import RunLog
from drawloom.components.report.metrics import Metrics

TIME = "%Y-%m-%d %H:%M:%S"


@attrs.frozen
class Ettr:
    """Seconds of steps that a run has kept, all seconds from its first message to its last, and steps that it lost."""

    learned: float
    wall: float
    lost_steps: int
    processes: int

    @property
    def ratio(self) -> float:
        """At most 1: times in the log are whole seconds."""
        return min(1.0, self.learned / self.wall)

    def __str__(self) -> str:
        learned, wall = (timedelta(seconds=round(seconds)) for seconds in (self.learned, self.wall))
        lost = f", {self.lost_steps:,} steps lost and done again" if self.lost_steps else ""
        several = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{self.ratio:.1%} in steps that count: {learned} of {wall} since the start{several}{lost}"


def ettr(log: RunLog, metrics: Metrics) -> Ettr | None:
    """Of a log and metrics; None if they do not tell."""
    if not log.first or not len(metrics.steps) or metrics.seconds[-1] <= 0:
        return None
    first, last = (datetime.strptime(time, TIME) for time in (log.first, log.last))
    if (wall := (last - first).total_seconds()) <= 0:
        return None
    return Ettr(float(metrics.seconds[-1]), wall, log.lost, log.starts)
