"""The forward and backward pass over batches that earlier phases of the step have made."""

from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Step
from drawloom.graph import component


@component(reads=("batches",), writes=("local_gradients", "losses"))
class PolicyGradient:
    """Forward and backward pass that accumulates gradients over the step's sampled completions."""

    executor: Executor

    def run_phase(self, step: Step) -> None:
        """Run the pipeline program on the batches, and write this rank's `losses`."""
        self.executor.run_forward_and_backward(step.state)
