"""
Blocks with stacked parameters, and running one iteration of this rank's stages: as one batch, or one after another.

As a batch (torch.vmap), products of small matrices become one product of a stack of them. Run one after another, stages
may do what can't be batched: custom autograd Functions, kernels, control flow that depends on values.

Stages in the bubble do not run. If they ran on zeros, as in a program of fixed shapes, they would cost as much as
others, count in side outputs, and give NaN for gradients wherever a zero has no derivative, since 0 * inf is NaN.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, get_args

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drawloom.components.storage.pytree import fill, leaves

Remat = Literal["nothing", "everything", "all_but_products"]
"""What is recomputed in the backward pass: nothing; everything, from a stage's inputs; everything but matmuls."""


def check_remat(remat: str) -> Remat:
    """The remat policy of this name; ValueError if there is none."""
    for known in get_args(Remat):
        if remat == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"remat={remat!r} is not a policy; write one of {', '.join(map(repr, get_args(Remat)))}")


_aten = torch.ops.aten


_PRODUCTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._grouped_mm)


def with_remat(remat: Remat, work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work`, with activations saved or recomputed by the policy; random numbers are reproduced."""
    if remat == "nothing" or not torch.is_grad_enabled():
        return work(*arguments)
    if remat == "everything":
        return checkpoint(work, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(work, *arguments, use_reentrant=False, context_fn=contexts)


def _keep_products(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    # Matmuls cost most to recompute, relative to the memory of their results.
    kept = getattr(operation, "overloadpacket", operation) in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def stack_blocks(blocks: Sequence[nn.Module], repeats: int) -> nn.Module:
    """
    One module with the stacked tensors of all blocks, (repeats, stages, ...); blocks are ordered by repeat, then stage.

    The blocks may differ only in the values of their parameters and buffers. Tensors with two names in a block (tied)
    keep both. Raises ValueError, with the block and the name, for tensors that differ in dtype or shape.
    """
    stages, left = divmod(len(blocks), repeats)
    if left or not stages:
        raise ValueError(f"{len(blocks)} blocks are not {repeats} repeats of the same number of stages")
    named = [_tensors(block) for block in blocks]
    for number, tensors in enumerate(named):
        _check_same_form(named[0], tensors, number)
    stacked = copy.deepcopy(blocks[0])
    # A tied tensor has several names; all of them must get one stacked parameter.
    stacked_of: dict[int, Tensor] = {}
    for name, first in named[0].items():
        if id(first) not in stacked_of:
            rows = torch.stack([tensors[name].detach() for tensors in named]).view(repeats, stages, *first.shape)
            parameter = isinstance(first, nn.Parameter)
            stacked_of[id(first)] = nn.Parameter(rows, first.requires_grad) if parameter else rows
        _put(stacked, name, stacked_of[id(first)])
    return stacked


def tensors_of(stacked: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer of stacked blocks, (repeats, stages, ...), under one of its names."""
    return dict([*stacked.named_parameters(), *stacked.named_buffers()])


def rows_of(stacked: nn.Module) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """For each block its repeat, its stage, and its tensors by name, (...) as views of (repeats, stages, ...)."""
    tensors = {name: tensor.detach() for name, tensor in tensors_of(stacked).items()}
    repeats, stages = next(iter(tensors.values())).shape[:2]
    for repeat in range(repeats):
        for stage in range(stages):
            yield repeat, stage, {name: tensor[repeat, stage] for name, tensor in tensors.items()}


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    parameters = block.named_parameters(remove_duplicate=False)
    return dict([*parameters, *block.named_buffers(remove_duplicate=False)])


def _check_same_form(first: Mapping[str, Tensor], other: Mapping[str, Tensor], number: int) -> None:
    if first.keys() != other.keys():
        different = ", ".join(sorted(first.keys() ^ other.keys()))
        raise ValueError(f"blocks 0 and {number} have different parameters: {different}")
    if not first:
        raise ValueError("a block without parameters can't be stacked")
    for name, tensor in first.items():
        mine, theirs = (f"{_form(one)}" for one in (tensor, other[name]))
        if mine != theirs:
            raise ValueError(f"blocks 0 and {number} differ in {name}: {mine} and {theirs}")


def _form(tensor: Tensor) -> str:
    trained = " (trained)" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{trained}"


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or a buffer."""
    path, _, last = name.rpartition(".")
    parent = module.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        parent._parameters[last] = tensor
    else:
        parent._buffers[last] = tensor


SideOutputs = dict[str, Tensor]
Weights = dict[str, Tensor]


@attrs.frozen
class Task:
    """The work of one stage in an iteration: its local index, its repeat, and the arguments of its block."""

    stage: int
    repeat: int
    input: Tensor
    shared: Any


class BlockRunner(Protocol):
    """Runs the blocks of an iteration; created for one pass, in which parameters don't change."""

    def run(self, tasks: Sequence[Task]) -> tuple[list[Tensor], list[SideOutputs]]:
        """The output (any shape) and the side outputs of each task's block; tasks are of consecutive stages."""
        ...


class SequentialBlocks:
    """Runs stages one after another."""

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
        """The output (any shape) and the side outputs of each task's block."""
        results = [with_remat(self._remat, self._one, task) for task in tasks]
        return [output for output, _ in results], [side for _, side in results]

    def _one(self, task: Task) -> tuple[Tensor, SideOutputs]:
        return call_block(self._stacked, self._rows[task.repeat][task.stage], task.input, task.shared)


class BatchedBlocks:
    """Runs stages as one batch."""

    def __init__(self, stacked: nn.Module, remat: Remat) -> None:
        self._stacked, self._remat = stacked, remat
        # unbind once for a pass: its backward stacks the gradients of all repeats in one operation.
        blocks = {name: tensor.unbind() for name, tensor in tensors_of(stacked).items()}
        repeats = len(next(iter(blocks.values())))
        self._repeats = [{name: rows[repeat] for name, rows in blocks.items()} for repeat in range(repeats)]

    def run(self, tasks: Sequence[Task]) -> tuple[list[Tensor], list[SideOutputs]]:
        """The output (any shape) and the side outputs of each task's block, whose tensors are rows of one batch."""
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
            # vmap's errors have no type of their own; other errors of a block must stay as they are.
            if any(word in str(error) for word in ("vmap", "functorch", "Batching rule")):
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"these blocks can't run as one batch; write batched=False. torch says: {reason}"
                ) from error
            raise

    def _weights(self, tasks: Sequence[Task]) -> Weights:
        """The weights of each task's block, (tasks, ...)."""
        # While a repeat begins on the first stages, later stages are still in the previous repeat.
        parts = []
        for repeat in sorted({task.repeat for task in tasks}, reverse=True):
            stages = [task.stage for task in tasks if task.repeat == repeat]
            parts.append({name: _slice(rows, stages) for name, rows in self._repeats[repeat].items()})
        return {name: torch.cat([part[name] for part in parts]) if parts[1:] else parts[0][name] for name in parts[0]}


def call_block(
    stacked: nn.Module, weights: dict[str, Tensor], given: Tensor, shared: Any
) -> tuple[Tensor, SideOutputs]:
    """A block's output (any shape) and its side outputs; {} if the block returns a tensor alone."""
    result = functional_call(stacked, weights, (given,) if shared is None else (given, shared))
    return (result, {}) if isinstance(result, Tensor) else result


def _slice(rows: Tensor, stages: Sequence[int]) -> Tensor:
    """Consecutive rows of a stack; all rows without a slice, whose gradient would be a copy of the whole."""
    return rows if len(stages) == len(rows) else rows[stages[0] : stages[-1] + 1]
