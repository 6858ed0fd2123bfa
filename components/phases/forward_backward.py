"""The forward and backward pass of a step's microbatches."""

from collections.abc import Iterator

from drawloom.components.ports.data import TrainingData
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Step
from drawloom.graph import component
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem


@component(writes=("local_gradients", "losses", "batches"))
class ForwardBackward:
    """Accumulates the gradients of a step's microbatches, and writes this rank's `losses` and `batches`."""

    data: TrainingData
    executor: Executor

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """A forward-only schedule can't train."""
        for executor in node.neighbours("executor"):
            for schedule in executor.neighbours("schedule"):
                if not getattr(schedule.component, "trains", True):
                    text = f"{schedule.use!r} is forward-only and computes no gradients"
                    yield schedule.problem("use", text, 'write use = "pipeline.schedules.gpipe"')

    def run_phase(self, step: Step) -> None:
        """Load the step's microbatches, and run the pipeline program on them."""
        microbatches = self.data.next_step()
        step.tokens = sum(batch.tokens.numel() for batch in microbatches)
        step.outputs["batches"] = microbatches
        step.outputs["losses"] = self.executor.train(microbatches)
