"""Steps, and passes over microbatches, whose state a test reads."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.pipeline import Executor, create_step_state
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Stages
from drawloom.components.state.host_copy import HostCopy
from drawloom.components.state.step_state import StepState


def prepare_weights(stages: Stages, only_if_changed: bool = False) -> None:
    """Prepare the weights for passes, as the executor does."""
    for copies in stages.weight_copies:
        copies.before_passes(only_if_changed)


def pass_on_gradients(stages: Stages) -> None:
    """Pass the gradients on to the optimizer's parameters, as the executor does after its passes."""
    for copies in stages.weight_copies:
        copies.after_backward()


class Arrival:
    """A CUDA event for counting how often the host waited for it; before a wait it has not happened."""

    def __init__(self) -> None:
        self.waits = 0

    def query(self) -> bool:
        return self.waits > 0

    def synchronize(self) -> None:
        self.waits += 1


class LateState(StepState):
    """A state whose tensors the host must wait for, as for a GPU's; `arrivals` are the events of its copies."""

    late_devices = ("cpu", "cuda")

    def __init__(self, values: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.arrivals: list[Arrival] = []
        super().__init__(values, **options)

    def start_host_copy(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Copy at once, with a pending event."""
        arrival: Any = Arrival()
        self.arrivals.append(arrival)
        return HostCopy({name: tensor.clone() for name, tensor in tensors.items()}, arrival)


def late(step: Step) -> LateState:
    """Return the LateState of a step."""
    if not isinstance(step.state, LateState):
        raise TypeError("the step's state is not late")
    return step.state


def train(executor: Executor, batches: Iterable[TokenBatch]) -> StepState:
    """Train on microbatches, and return the state with their losses."""
    state = create_step_state(batches)
    executor.run_forward_and_backward(state)
    return state


def evaluate(executor: Executor, batches: Iterable[TokenBatch]) -> StepState:
    """Evaluate microbatches, and return the state with their losses."""
    state = create_step_state(batches)
    executor.evaluate(state)
    return state


def losses_of(total: float, weight: float) -> dict[str, Any]:
    """Return the value `losses` of a step of one microbatch, float64."""
    return {
        "loss": torch.tensor([total], dtype=torch.float64),
        "weight": torch.tensor([weight], dtype=torch.float64),
        "sums": {},
    }


def make_skipped_step(
    index: int, total: int, reason: str = "the loss is nan", state: Mapping[str, Any] | None = None
) -> Step:
    """Return a step skipped by a phase."""
    step = Step(index, total, state or {})
    step.skip(reason)
    return step


def values_of(step: Step) -> dict[str, Any]:
    """Return the values of a step's global view."""
    return {name: step.state[name] for name in step.state}
