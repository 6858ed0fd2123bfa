"""
Spikes of the loss: a warning, or a way back to the last checkpoint and past the batches since.

Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, section 5.1: the same batches after another checkpoint did not spike.
"""

import logging
from statistics import fmean, pstdev
from typing import Any

import attrs

from drawloom.components.ports.data import MovableData
from drawloom.components.ports.run import Step
from drawloom.graph import UserError, above, at_least, component, setting

LEAST_DEVIATION = 0.01
"""The share of the mean below which a deviation is none, where losses hardly differ."""

log = logging.getLogger("drawloom.run")


@component(reads=("loss",), changes=("gradients", "skip"))
class LossSpikes:
    """
    Warns of a loss that is far above those of the steps before; with `go_back` the run returns to its last checkpoint.

    Such a step is skipped. The run then continues from its newest checkpoint, but with the rows after those of the
    step, so that the batches since the checkpoint are not seen again. All ranks have the same loss, and go back alike.
    The host then waits for the loss before each update; without `go_back` it does not, and warns a step late on a GPU.
    """

    data: MovableData
    window: int = setting(default=100, check=at_least(2), doc="steps before, with whose losses a loss is compared")
    deviations: float = setting(
        default=8.0, check=above(0), doc="standard deviations above the mean from which on a loss is a spike"
    )
    go_back: int = setting(
        default=0, check=at_least(0), doc="how often the run may go back; a spike after that ends it; 0 only warns"
    )

    _losses: list[float] = attrs.field(init=False, factory=list)
    _times: int = attrs.field(init=False, default=0)
    _position: int | None = attrs.field(init=False, default=None)
    _late: list[Step] = attrs.field(init=False, factory=list)

    def run_phase(self, step: Step) -> None:
        """Compare the loss of the step. Raises UserError, on all ranks, for a spike after the run went back enough."""
        if not self.go_back:
            self._late.append(step)
            self._warn(step.last)
        elif not step.skip_reason and (spike := self._spike(step)):
            if self._times >= self.go_back:
                raise UserError(
                    f"step {step.index}: {spike}, after the run went back {self._times} times; lower the learning "
                    "rate or clip more, or write a larger go_back"
                )
            self._times += 1
            self._position = self.data.position
            step.goes_back = True
            step.skip(f"{spike}; the run goes back, time {self._times} of {self.go_back}")

    def after_restore(self, done: int) -> None:
        """Where the run went back: have the data continue behind the step that spiked."""
        if self._position is not None:
            self.data.continue_at(self._position)
            self._position = None

    def state_dict(self) -> dict[str, Any]:
        """`losses`, those of the last steps, and `times`, how often the run went back."""
        self._warn(wait=True)
        return {"losses": list(self._losses), "times": self._times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with saved losses from now on; a run that goes back knows of more times than its checkpoint."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._times = max(self._times, int(state["times"]))

    def _warn(self, wait: bool) -> None:
        """Compare the steps whose losses are on the host, or all with `wait`."""
        while self._late and (wait or self._late[0].state.is_on_host):
            step = self._late.pop(0)
            if not step.skip_reason and (spike := self._spike(step)):
                log.warning("step %d: %s", step.index, spike)

    def _spike(self, step: Step) -> str:
        """The sentence for a step whose loss is a spike; empty for another loss, with which later ones are compared."""
        loss, spike = step.state.number("loss"), ""
        if len(self._losses) >= self.window:
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            if loss > mean + self.deviations * max(deviation, LEAST_DEVIATION * abs(mean)):
                before = f"{mean:.4f} with a deviation of {deviation:.4f} in the {self.window} steps before"
                spike = f"the loss {loss:.4f} is a spike: it was {before}"
        if not (spike and self.go_back):
            self._losses = [*self._losses, loss][-self.window :]
        return spike
