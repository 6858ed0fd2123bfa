"""The phase that learns: the step's microbatches through the model and back."""

from drawloom.components.ports.data import TrainingData
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Step
from drawloom.graph import component


@component(writes=("gradients", "losses"))
class ForwardBackward:
    """Adds each microbatch's gradients to the parameters', and leaves this rank's `losses`."""

    data: TrainingData
    executor: Executor

    def run_phase(self, step: Step) -> None:
        """Take the step's microbatches and carry the program out on them."""
        microbatches = self.data.next_step()
        step.tokens = sum(batch.tokens.numel() for batch in microbatches)
        step.values["losses"] = self.executor.train(microbatches)
