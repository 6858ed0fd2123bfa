"""The forward and backward pass over batches that earlier phases of the step have made."""

import attrs

from drawloom import Every, component
from drawloom.components.phases.training_passes import run_passes_until_rows_fit
from drawloom.ports import Executor, Parameters, PassObserver, RowLimit, Step


@component(reads=("batches",), writes=("local_gradients", "losses"))
class PolicyGradient:
    """Forward and backward pass that accumulates gradients over the step's sampled completions."""

    executor: Executor
    parameters: Parameters
    limits: Every[RowLimit] = attrs.field(factory=Every)
    observers: Every[PassObserver] = attrs.field(factory=Every)

    def run_phase(self, step: Step) -> None:
        """Run the pipeline program on the batches, and write this rank's `losses`."""
        run_passes_until_rows_fit(step.state, self.executor, self.parameters, self.limits, self.observers)
