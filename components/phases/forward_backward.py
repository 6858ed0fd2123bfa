"""The forward and backward pass of a step's microbatches."""

from drawloom.components.ports.data import TrainingData
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Step
from drawloom.graph import component


@component(writes=("local_gradients", "losses", "batches"))
class ForwardBackward:
    """Accumulates the gradients of a step's microbatches, and writes this rank's `losses` and `batches`."""

    data: TrainingData
    executor: Executor

    def run_phase(self, step: Step) -> None:
        """Load the step's microbatches, and run the pipeline program on them."""
        microbatches = self.data.next_step()
        step.tokens = sum(batch.tokens.numel() for batch in microbatches)
        step.outputs["batches"] = microbatches
        step.outputs["losses"] = self.executor.train(microbatches)
