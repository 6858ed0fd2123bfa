"""Evaluation: the loss on the validation split."""

import time

from drawloom.components.ports.data import ValidationData
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Executor, state_of_batches, sum_losses
from drawloom.components.ports.run import Cadence, Step, check_cadence, due
from drawloom.components.ports.stages import AveragedWeights, averaged
from drawloom.graph import component, setting


@component(reads=("weights",), writes=("validation_loss",), impact="safe")
class Evaluate:
    """
    Measures the mean loss per token over some rows of the validation split, equal on every rank and for every mesh.

    With an `average`, it is that of the averaged weights.
    """

    data: ValidationData
    executor: Executor
    mesh: Mesh
    average: AveragedWeights | None = None
    every: Cadence = setting(default=100, check=check_cadence, doc='steps between evaluations, or "last" or "never"')

    def run_phase(self, step: Step) -> None:
        """Write `validation_loss`, in nats per token, at the steps of `every`."""
        if not due(self.every, step):
            return
        began = time.monotonic()
        with averaged(self.average):
            state = state_of_batches(self.data.batches())
            self.executor.evaluate(state)
        # sums and not means are reduced: ranks may have different numbers of tokens
        sums = sum_losses(state)
        self.mesh.pipeline_group.sum(sums)
        self.mesh.data_group.sum(sums)
        total, weight = sums.tolist()
        if weight > 0:
            step.state["validation_loss"] = total / weight
        step.excluded_seconds += time.monotonic() - began
