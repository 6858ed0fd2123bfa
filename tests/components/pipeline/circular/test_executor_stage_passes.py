"""Passes of stages as nodes of one graph."""

from typing import Any

import pytest
import torch

from drawloom.components.pipeline.circular.executor import StagePasses


class Shards:
    """Parameters of data-parallel ranks, gathered by stage and reduced by microbatch; `told` has the unshards."""

    gathers_per_block = False
    reduces_per_microbatch = True

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def start_unshard(self) -> None:
        self.told.append("unshard")


class Runner:
    """A stage that multiplies by three and records its unshards and reductions."""

    last = False

    def __init__(self) -> None:
        self.stage: Any = self
        self.told: list[Any] = []
        self.shards = Shards(self.told)

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        self.told.append(is_last_in_step)

    def forward(self, microbatch: int, inputs: Any, *_: Any) -> Any:
        self.told.append(f"F{microbatch}")
        return (3 * inputs).detach()

    def backward(self, microbatch: int, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        self.told.append(f"B{microbatch}")
        return [3 * grads[0]]


class Inputs:
    """A microbatch."""

    shared = batch = finish = None


@pytest.mark.parametrize("reduces_per_microbatch", [False, True])
def test_shards_are_gathered_first_and_reduced_with_the_last_backward(reduces_per_microbatch: bool) -> None:
    """A stage is gathered once, and its last backward pass reduces; earlier ones do so where shards want it."""
    runner: Any = Runner()
    runner.shards.reduces_per_microbatch = reduces_per_microbatch
    inputs: Any = [Inputs(), Inputs()]
    passes = StagePasses({1: runner}, inputs, torch.zeros((), requires_grad=True))
    given = torch.ones(2, requires_grad=True)
    outputs = [passes.run_differentiable_pass(1, number, given) for number in range(2)]
    torch.autograd.backward(torch.stack(outputs).sum())
    assert given.grad is not None and given.grad.tolist() == [6, 6]
    first = [False] if reduces_per_microbatch else []
    assert runner.told == ["unshard", "F0", "F1", *first, "B1", True, "B0"]
