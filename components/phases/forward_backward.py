"""The phase that learns: the step's microbatches through the model and back."""

from collections.abc import Iterator

from drawloom.components.ports.data import TrainingData
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Step
from drawloom.graph import component
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem


@component(writes=("local_gradients", "losses"))
class ForwardBackward:
    """Adds each microbatch's gradients to the parameters', and leaves this rank's `losses`."""

    data: TrainingData
    executor: Executor

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """A schedule that only goes forward learns nothing."""
        for executor in node.neighbours("executor"):
            for schedule in executor.neighbours("schedule"):
                if not getattr(schedule.component, "trains", True):
                    text = f"{schedule.use!r} only goes forward, so that nothing would be learned"
                    yield schedule.problem("use", text, 'write use = "pipeline.schedules.gpipe"')

    def run_phase(self, step: Step) -> None:
        """Take the step's microbatches and carry the program out on them."""
        microbatches = self.data.next_step()
        step.tokens = sum(batch.tokens.numel() for batch in microbatches)
        step.outputs["losses"] = self.executor.train(microbatches)
