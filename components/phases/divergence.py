"""Divergence: ends a run whose model has stopped learning."""

import math

from drawloom import UserError, above, at_least, component, internal, setting
from drawloom.ports import NodeState, Step

SMALLEST_SCALE = 1.5
"""Nats; a smaller first loss, as in fine-tuning or preference training, is replaced by this value in the limit."""


@component(reads=("loss", "grad_norm"), impact="safe")
class Divergence:
    """
    Guard that ends a diverged run before it saves, exports and samples useless weights.

    A step is lost if its loss is far above the first step's, or if its gradients are not finite or all 0. The run ends
    after `steps` lost steps in a row. A step with nothing to learn does not count: without a token, or with a loss of 0
    and gradients of 0, as of completions that all have one reward.
    """

    steps: int = setting("consecutive lost steps after which the run ends", default=10, check=at_least(1))
    factor: float = setting("threshold for a lost step, relative to the first loss", default=3.0, check=above(1))

    _first: float | None = internal(None)
    _lost: int = internal(0)
    _late: Step | None = internal(None)

    def run_phase(self, step: Step) -> None:
        """Judge the step, or the previous step if a device computes the loss. Raises UserError on all ranks alike."""
        late, self._late = self._late, None
        if late is not None:
            self._count_diverged_steps_or_raise(late)
        # All ranks have the loss on a device of the same kind, and judge the same step.
        if step.state["loss"].device.type not in step.state.late_devices or step.is_last:
            self._count_diverged_steps_or_raise(step)
        else:
            self._late = step

    def state_dict(self) -> NodeState:
        """Return `first`, the run's first loss, and `lost`, the number of consecutive lost steps."""
        if self._late is not None:
            self._count_diverged_steps_or_raise(self._late)
            self._late = None
        return {"first": self._first, "lost": self._lost}

    def load_state_dict(self, state: NodeState) -> None:
        self._first = None if state["first"] is None else float(state["first"])
        self._lost = int(state["lost"])
        self._late = None

    def _count_diverged_steps_or_raise(self, step: Step) -> None:
        """Count consecutive lost steps. Raises UserError after `steps` lost steps in a row."""
        loss, norm = step.state.number("loss"), step.state.number("grad_norm")
        if step.goes_back or loss == norm == 0 or (math.isfinite(norm) and not math.isfinite(loss)):
            return  # there was nothing to learn
        if self._first is None and math.isfinite(loss):
            self._first = loss
        is_diverged = not math.isfinite(norm) or norm == 0 or loss > self._max_loss
        self._lost = self._lost + 1 if is_diverged else 0
        if self._lost >= self.steps:
            raise UserError(self._describe_divergence(step.index, loss, norm))

    @property
    def _max_loss(self) -> float:
        """The largest loss that does not count as lost."""
        if self._first is None:
            return math.inf
        return self._first + (self.factor - 1) * max(abs(self._first), SMALLEST_SCALE)

    def _describe_divergence(self, index: int, loss: float, norm: float) -> str:
        begin = index - self._lost
        above, began = "", "was never finite"
        if self._first is not None:
            above, began = f"the loss was above {self._max_loss:.4g}, or ", f"began at {self._first:.4g}"
        return (
            f"training has diverged: since step {begin + 1} {above}gradients were 0 or not finite; the loss {began}, "
            f"and is {loss:.4g} at step {index} with a gradient norm of {norm:.4g}; lower the learning rate, lengthen "
            "its warm-up or clip more, and start again under another run name, or remove the checkpoints after step "
            f"{begin} and start this run again"
        )
