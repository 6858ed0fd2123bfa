"""The forward and backward pass over a step's microbatches, with gradient accumulation."""

from collections.abc import Iterator

import attrs

from drawloom import Every, NodeView, Problem, component
from drawloom.ports import (
    STEP_SPECS,
    Event,
    Events,
    Executor,
    Parameters,
    PassObserver,
    RowLimit,
    Step,
    TrainingData,
    uses_preference_pairs,
)


@component(writes=("local_gradients", "losses", "batches"))
class ForwardBackward:
    """Forward and backward pass that accumulates gradients over a step's microbatches."""

    data: TrainingData
    executor: Executor
    parameters: Parameters
    events: Events
    limits: Every[RowLimit] = attrs.field(factory=Every)
    observers: Every[PassObserver] = attrs.field(factory=Every)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a loss that does not fit the data: pairs, or unpaired answers, in only one of them."""
        data, executor = node.neighbour("data"), node.neighbour("executor")
        rows, loss = data and data.neighbour("rows"), executor and executor.neighbour("objective")
        if not executor or not rows or not loss:
            return
        if any(uses_preference_pairs(other.component) for other in (loss, *rows.reachable())):
            from drawloom.components.phases.answer_checks import find_answer_problems

            yield from find_answer_problems(rows, loss, executor)

    def run_phase(self, step: Step) -> None:
        """Load the microbatches, run the pipeline program on them, and write this rank's `losses` and `batches`."""
        microbatches = self.data.next_step()
        self.events.emit(Event("data_loaded", step))
        step.state.clear_for_new_step(len(microbatches), STEP_SPECS)
        step.state["batches"] = microbatches
        if not self.limits:
            self.executor.run_forward_and_backward(step.state)
            return
        from drawloom.components.phases.training_passes import run_passes_until_rows_fit  # experts may lack room

        run_passes_until_rows_fit(step.state, self.executor, self.parameters, self.limits, self.observers)
