"""
One iteration's work of the stages on this rank: all of them as one batch, or one after another.

As a batch (torch.vmap), products of small matrices become one product of a stack of them. One after another, stages may
do what can't be batched: operations with a backward pass of their own, kernels, decisions that depend on values.

Stages that are in the bubble do not run at all. Run on zeros, as in a program of fixed shapes, they would cost as much
as others, count in side outputs, and give NaN for gradients wherever a zero has no derivative: the gradient 0 that
comes back to them does not heal that, since 0 * inf is NaN.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from drawloom.components.pipeline.circular.remat import Remat, with_remat
from drawloom.components.pipeline.circular.stacking import tensors_of
from drawloom.components.storage.pytree import fill, leaves

SideOutputs = dict[str, Tensor]
Weights = dict[str, Tensor]


@attrs.frozen
class Task:
    """What one stage of this rank (counted from 0 here) does in an iteration: its repeat, and what its block takes."""

    stage: int
    repeat: int
    input: Tensor
    shared: Any


class Running(Protocol):
    """Does the work of an iteration; it is made for one pass, in which parameters don't change."""

    def run(self, tasks: Sequence[Task]) -> tuple[list[Tensor], list[SideOutputs]]:
        """What the block of each task gives; tasks are those of neighbouring stages."""
        ...


class InTurn:
    """Stages run one after another."""

    def __init__(self, stacked: nn.Module, remat: Remat) -> None:
        self._stacked, self._remat = stacked, remat
        tensors = tensors_of(stacked)
        blocks = {name: [rows.unbind() for rows in tensor.unbind()] for name, tensor in tensors.items()}
        repeats, stages = next(iter(tensors.values())).shape[:2]
        self._rows = [
            [{name: rows[repeat][stage] for name, rows in blocks.items()} for stage in range(stages)]
            for repeat in range(repeats)
        ]

    def run(self, tasks: Sequence[Task]) -> tuple[list[Tensor], list[SideOutputs]]:
        results = [with_remat(self._remat, self._one, task) for task in tasks]
        return [output for output, _ in results], [side for _, side in results]

    def _one(self, task: Task) -> tuple[Tensor, SideOutputs]:
        return call_block(self._stacked, self._rows[task.repeat][task.stage], task.input, task.shared)


class AtOnce:
    """Stages run as one batch."""

    def __init__(self, stacked: nn.Module, remat: Remat) -> None:
        self._stacked, self._remat = stacked, remat
        blocks = {name: tensor.unbind() for name, tensor in tensors_of(stacked).items()}
        repeats = len(next(iter(blocks.values())))
        self._repeats = [{name: rows[repeat] for name, rows in blocks.items()} for repeat in range(repeats)]

    def run(self, tasks: Sequence[Task]) -> tuple[list[Tensor], list[SideOutputs]]:
        outputs, sides = with_remat(self._remat, self._batch, tasks)
        columns = {name: tensor.unbind() for name, tensor in sides.items()}
        places = range(len(tasks))
        return list(outputs.unbind()), [{name: rows[place] for name, rows in columns.items()} for place in places]

    def _batch(self, tasks: Sequence[Task]) -> tuple[Tensor, SideOutputs]:
        columns = zip(*(leaves(task.shared) for task in tasks), strict=True)
        shared = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]

        def one(weights: Weights, given: Tensor, shared: list[Any]) -> tuple[Tensor, SideOutputs]:
            return call_block(self._stacked, weights, given, fill(tasks[0].shared, shared))

        places = [0 if isinstance(leaf, Tensor) else None for leaf in shared]
        batched = torch.vmap(one, in_dims=(0, 0, places), randomness="different")
        try:
            return batched(self._weights(tasks), torch.stack([task.input for task in tasks]), shared)
        except RuntimeError as error:
            if any(word in str(error) for word in ("vmap", "functorch", "Batching rule")):
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"these blocks can't run as one batch; write batched=False. torch says: {reason}"
                ) from error
            raise

    def _weights(self, tasks: Sequence[Task]) -> Weights:
        """The weights of each task's block, [tasks, ...]. Stages behind the front of a repeat are in the one before."""
        parts = []
        for repeat in sorted({task.repeat for task in tasks}, reverse=True):
            stages = [task.stage for task in tasks if task.repeat == repeat]
            parts.append({name: _slice(rows, stages) for name, rows in self._repeats[repeat].items()})
        return {name: torch.cat([part[name] for part in parts]) if parts[1:] else parts[0][name] for name in parts[0]}


def call_block(
    stacked: nn.Module, weights: dict[str, Tensor], given: Tensor, shared: Any
) -> tuple[Tensor, SideOutputs]:
    """A block's output and its side outputs, none if it gives a tensor alone."""
    result = functional_call(stacked, weights, (given,) if shared is None else (given, shared))
    return (result, {}) if isinstance(result, Tensor) else result


def _slice(rows: Tensor, stages: Sequence[int]) -> Tensor:
    """Neighbouring rows; all of them as they are, since the gradient of a slice is a copy of the whole."""
    return rows if len(stages) == len(rows) else rows[stages[0] : stages[-1] + 1]
