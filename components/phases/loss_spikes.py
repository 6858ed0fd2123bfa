"""
Loss spikes: a warning, or a return to the last checkpoint without the batches since then.

Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, section 5.1: the same batches did not spike after another checkpoint.
"""

from statistics import fmean, pstdev

from drawloom import UserError, above, at_least, component, internal, setting
from drawloom.ports import MovableData, NodeState, Step, run_log

MIN_DEVIATION = 0.01
"""Smallest standard deviation as a fraction of the mean; a smaller one counts as this large."""


@component(reads=("loss",), changes=("gradients", "skip"))
class LossSpikes:
    """
    Loss spike detector: it warns, or with `go_back` returns the run to its last checkpoint.

    When it goes back, a run skips the step, and continues from its newest checkpoint with the rows after the step's
    rows: the batches since the checkpoint are not used again. All ranks compare the same loss and go back together.
    With `go_back` the host waits for the loss before an update. Without it the host does not wait, and on a GPU the
    warning comes one step late.
    """

    data: MovableData
    window: int = setting("number of previous losses for the comparison", default=100, check=at_least(2))
    deviations: float = setting(
        "spike threshold: standard deviations above the window's mean", default=8.0, check=above(0)
    )
    go_back: int = setting(
        "how often the run may go back to a checkpoint, before a spike ends it; 0: only warn",
        default=0,
        check=at_least(0),
    )

    _losses: list[float] = internal(factory=list)
    _times: int = internal(0)
    _position: int | None = internal(None)
    _late: list[Step] = internal(factory=list)

    def run_phase(self, step: Step) -> None:
        """Compare the step's loss. Raises UserError on all ranks for a spike if the run may not go back again."""
        if not self.go_back:
            self._late.append(step)
            self._warn_of_late_spikes(step.is_last)
        elif not step.skip_reason and (spike := self._record_loss_and_describe_spike(step)):
            if self._times >= self.go_back:
                raise UserError(
                    f"step {step.index}: {spike}, after the run went back {self._times} times; lower the learning "
                    "rate or clip more, or write a larger go_back"
                )
            self._times += 1
            self._position = self.data.next_row_position
            step.goes_back = True
            step.skip(f"{spike}; the run goes back, time {self._times} of {self.go_back}")

    def after_restore(self, restored_step: int) -> None:
        """Continue the data after the spike's rows, if the run went back."""
        if self._position is not None:
            self.data.skip_to_position(self._position)
            self._position = None

    def state_dict(self) -> NodeState:
        """Return `losses`, the last steps' losses, and `times`, how often the run went back."""
        self._warn_of_late_spikes(wait_for_losses=True)
        return {"losses": list(self._losses), "times": self._times}

    def load_state_dict(self, state: NodeState) -> None:
        # a run that goes back has counted more returns than its checkpoint
        self._losses = [float(loss) for loss in state["losses"]]
        self._times = max(self._times, int(state["times"]))

    def _warn_of_late_spikes(self, wait_for_losses: bool) -> None:
        """Warn of spikes in late steps whose loss has reached the host, or with `wait_for_losses` in all late steps."""
        while self._late and (wait_for_losses or self._late[0].state.is_on_host):
            step = self._late.pop(0)
            if not step.skip_reason and (spike := self._record_loss_and_describe_spike(step)):
                run_log.warning("step %d: %s", step.index, spike)

    def _record_loss_and_describe_spike(self, step: Step) -> str:
        """
        Return a sentence if the step's loss is a spike, else "".

        The loss enters the window, unless it is a spike from which the run goes back.
        """
        loss, spike = step.state.number("loss"), ""
        if len(self._losses) >= self.window:
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            if loss > mean + self.deviations * max(deviation, MIN_DEVIATION * abs(mean)):
                before = f"{mean:.4f} with a deviation of {deviation:.4f} in the {self.window} steps before"
                spike = f"the loss {loss:.4f} is a spike: it was {before}"
        if not (spike and self.go_back):
            self._losses = [*self._losses, loss][-self.window :]
        return spike
