"""What is written down about each step, and the line that people read."""

import logging
from collections.abc import Callable, Mapping

import attrs

from drawloom.components.ports.run import Cadence, Metric, Step, Tracker, Value, a_cadence, due
from drawloom.graph import component, setting

log = logging.getLogger("drawloom.run")


@component(reads=("loss", "grad_norm?", "lr?", "validation_loss?"), impact="safe")
class Report:
    """Collects every metric of a step, hands them to every tracker, and logs the step line."""

    metrics: list[Metric] = attrs.field(factory=list)
    trackers: list[Tracker] = attrs.field(factory=list)
    every: Cadence = setting(default=1, check=a_cadence, doc='steps between lines in the log, or "last" or "never"')

    _rewound: bool = attrs.field(init=False, default=False)
    _dropped: set[int] = attrs.field(init=False, factory=set)

    def run_phase(self, step: Step) -> None:
        """Write the step down; the first of a process takes back what a run that was killed wrote of later ones."""
        values = {name: value for metric in self.metrics for name, value in metric.measure(step).items()}
        if not self._rewound:
            self._rewound = True
            self._each(lambda tracker: tracker.rewind(step.index - 1))
        self._each(lambda tracker: tracker.track(step.index, values))
        if step.skip_reason:
            log.warning("step %d/%d refused: %s", step.index, step.total, step.skip_reason)
        elif due(self.every, step):
            log.info("%s", step_line(step, values), extra={"step_line": True})

    def _each(self, work: Callable[[Tracker], None]) -> None:
        """Do something with every tracker; one that fails is left alone from then on, and the run goes on."""
        for place, tracker in enumerate(self.trackers):
            if place not in self._dropped:
                try:
                    work(tracker)
                except Exception:
                    self._dropped.add(place)
                    log.exception("%s failed and is told nothing more; the run goes on", type(tracker).__name__)


def step_line(step: Step, values: Mapping[str, Value]) -> str:
    """`step 12/300  loss 2.3456  grad_norm 0.83 ...`, with the parts whose values there are."""
    parts = [part(number) for name, part in PARTS.items() if (number := values.get(name)) is not None]
    return "  ".join([f"step {step.index}/{step.total}", *parts])


def _short(number: float) -> str:
    return f"{number:.2f}" if abs(number) >= 0.1 else f"{number:#.2g}"


PARTS: Mapping[str, Callable[[float], str]] = {
    "loss": lambda number: f"loss {number:.4f}",
    "validation_loss": lambda number: f"validation loss {number:.4f}",
    "grad_norm": lambda number: f"grad_norm {_short(number)}",
    "lr": lambda number: f"lr {number:#.2g}",
    "tokens_per_second": lambda number: f"{number:,.0f} tokens/s",
    "memory": lambda number: f"{number / 1e6:,.0f} MB",
}
