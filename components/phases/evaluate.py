"""Evaluation: the loss on the validation split."""

import time

import attrs

from drawloom.components.ports.data import ValidationData
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Executor, create_step_state, sum_losses_and_weights
from drawloom.components.ports.run import Cadence, Step, describe_cadence_fault, is_due
from drawloom.components.ports.stages import AveragedWeights, use_averages_if_any
from drawloom.graph import component, setting


@component(reads=("weights",), writes=("validation_loss", "initial_validation_loss"), impact="safe")
class Evaluate:
    """
    Mean loss per token over some validation rows, equal on every rank and for every mesh.

    With an `average`, the loss under the averaged weights.
    """

    data: ValidationData
    executor: Executor
    mesh: Mesh
    average: AveragedWeights | None = None
    every: Cadence = setting(
        default=100, check=describe_cadence_fault, doc='steps between evaluations, or "last" or "never"'
    )
    at_start: bool = setting(
        default=False,
        doc=(
            "whether a new run also evaluates before its first step, so the validation loss curve begins at step "
            "0; not if `every` is never"
        ),
    )

    _initial: float | None = attrs.field(init=False, default=None)

    def after_restore(self, restored_step: int) -> None:
        """Evaluate a new run's initial weights."""
        if self.at_start and self.every != "never":
            self._initial = self._measure_loss_per_token() if restored_step == 0 else None

    def run_phase(self, step: Step) -> None:
        """
        Write `validation_loss`, in nats per token, at `every`'s steps.

        A new run's first step also gets the `initial_validation_loss`.
        """
        if self._initial is not None:
            step.state["initial_validation_loss"], self._initial = self._initial, None
        if not is_due(self.every, step):
            return
        began = time.monotonic()
        if (loss := self._measure_loss_per_token()) is not None:
            step.state["validation_loss"] = loss
        step.excluded_seconds += time.monotonic() - began

    def _measure_loss_per_token(self) -> float | None:
        """Return the mean loss per token; None if the split is empty. A collective."""
        with use_averages_if_any(self.average):
            state = create_step_state(self.data.batches())
            self.executor.evaluate(state)
        # sums are reduced, not means, because ranks may have different numbers of tokens
        sums = sum_losses_and_weights(state)
        self.mesh.pipeline_group.sum(sums)
        self.mesh.data_group.sum(sums)
        total, weight = sums.tolist()
        return total / weight if weight > 0 else None
