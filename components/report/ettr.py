"""
Effective training time ratio (ETTR): seconds in productive steps, divided by seconds since the run's start.

Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025, section II-D. A
step is productive if its update is still in the run's weights. A resume removes steps lost by a kill from
`metrics.jsonl`. All other time counts against the ratio: starts, evaluations, saves, lost steps, and the time between
processes, which are in the log.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import attrs

from drawloom.components.report.events import RunLog
from drawloom.components.report.metrics import Metrics

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
RECOVERY_PREFIX = "recovery/"
"""Prefix for metrics with the seconds lost with a survived loss, by part (`metrics.recovery`)."""
RECOVERY_PARTS = ("detect", "agree", "rebuild", "transfer", "repeat")


@attrs.frozen
class Ettr:
    """
    Seconds in a run's productive steps, seconds between its first and last message, and lost step count.

    `recoveries` counts steps repeated in memory after lost ranks, and `recovery_seconds` has the seconds lost by part,
    such as `detect`.
    """

    productive_seconds: float
    wall_seconds: float
    lost_steps: int
    processes: int
    recoveries: int = 0
    recovery_seconds: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def productive_time_fraction(self) -> float:
        """Productive time fraction, at most 1."""
        return min(1.0, self.productive_seconds / self.wall_seconds)  # the log rounds times to seconds

    def __str__(self) -> str:
        productive, wall = (
            timedelta(seconds=round(seconds)) for seconds in (self.productive_seconds, self.wall_seconds)
        )
        lost = f", {self.lost_steps:,} steps lost and done again" if self.lost_steps else ""
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        share = f"{self.productive_time_fraction:.1%} in steps that count"
        recovered = ""
        if self.recoveries:
            parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.recovery_seconds.items())
            steps = "1 step" if self.recoveries == 1 else f"{self.recoveries:,} steps"
            recovered = f", {steps} repeated in memory within {sum(self.recovery_seconds.values()):.2f} s ({parts})"
        return f"{share}: {productive} of {wall} since the start{processes}{lost}{recovered}"


def compute_ettr(log: RunLog, metrics: Metrics) -> Ettr | None:
    """Compute a run's effective training time ratio (ETTR) from its log and metrics; None without times or steps."""
    if not log.first or not len(metrics.steps) or metrics.total_seconds_by_step[-1] <= 0:
        return None
    first, last = (datetime.strptime(time, TIME_FORMAT) for time in (log.first, log.last))
    if (wall_seconds := (last - first).total_seconds()) <= 0:
        return None
    values = _list_recovery_seconds_by_part(metrics)
    return Ettr(
        productive_seconds=float(metrics.total_seconds_by_step[-1]),
        wall_seconds=wall_seconds,
        lost_steps=log.lost,
        processes=log.starts,
        recoveries=max(map(len, values.values()), default=0),
        recovery_seconds=sum_recovery_seconds(metrics),
    )


def sum_recovery_seconds(metrics: Metrics) -> dict[str, float]:
    """Return the seconds lost in recoveries from losses, by part; empty without any."""
    return {part: sum(values) for part, values in _list_recovery_seconds_by_part(metrics).items()}


def _list_recovery_seconds_by_part(metrics: Metrics) -> dict[str, Sequence[float]]:
    """Return the seconds in every recovery, by part."""
    columns = {part: metrics.columns.get(f"{RECOVERY_PREFIX}{part}") for part in RECOVERY_PARTS}
    return {part: column.values for part, column in columns.items() if column is not None}
