"""Early stopping (Prechelt 1998, "Early stopping - but when?"): ends a run whose metric no longer improves."""

import math
from typing import ClassVar, Literal

from drawloom import at_least, between, component, internal, setting
from drawloom.ports import NodeState, Step


@component(reads=("loss?", "validation_loss?"), impact="safe")
class EarlyStopping:
    """
    Early stopping: the run ends as after its last step, once a metric has not improved for `patience` of its values.

    It comes after the phase that writes the metric, and before the report and the checkpoint. A value that is not
    finite is not an improvement. If `patience` grows, the ended run goes on.
    """

    number_settings: ClassVar[tuple[str, ...]] = ("metric",)

    metric: str = setting("watched number; with loss, the host waits for it every step", default="validation_loss")
    patience: int = setting("values in a row without improvement that end the run", default=3, check=at_least(1))
    min_change: float = setting(
        "smallest difference from the best value that is an improvement", default=0.0, check=between(0, math.inf)
    )
    best_is: Literal["lowest", "highest"] = setting("better values of `metric`: low or high", default="lowest")

    _best: float | None = internal(None)
    _best_step: int = internal(0)
    _waited: int = internal(0)

    def run_phase(self, step: Step) -> None:
        """Compare the metric, if the step has one, and end the run if it did not improve. A skipped step counts too."""
        if self.metric not in step.state:
            return
        value = step.state.number(self.metric)
        if self._is_improvement(value):
            self._best, self._best_step, self._waited = value, step.index, 0
        else:
            self._waited += 1
        if reason := self.stop_reason():
            step.stop(reason)

    def stop_reason(self) -> str:
        if self._waited < self.patience:
            return ""
        best = "was never finite"
        if self._best is not None:
            best = f"was {self._best:.4f} after step {self._best_step}"
        return f"{self.metric} {best}, and did not improve {self._waited} times in a row"

    def state_dict(self) -> NodeState:
        """Return the best value, its step, and the number of values since then."""
        return {"best": self._best, "step": self._best_step, "waited": self._waited}

    def load_state_dict(self, state: NodeState) -> None:
        self._best = None if state["best"] is None else float(state["best"])
        self._best_step, self._waited = int(state["step"]), int(state["waited"])

    def _is_improvement(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        change = self._best - value if self.best_is == "lowest" else value - self._best
        return change > 0 and change >= self.min_change
