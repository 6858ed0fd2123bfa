"""
Blocks of one form as a single module, whose parameters have two dimensions more: [repeats, stages].

The module is a block in all else, so that its parameters have a block's names, and one row of them makes it a block.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


def stack_blocks(blocks: Sequence[nn.Module], repeats: int) -> nn.Module:
    """
    One module with the tensors of all blocks, which come repeat by repeat, and stage by stage in each.

    The blocks may differ in the values of their parameters and buffers, and in nothing else. Tensors that have two
    names in a block keep both. Raises ValueError, with the block and the name, for blocks that differ in form.
    """
    stages, left = divmod(len(blocks), repeats)
    if left or not stages:
        raise ValueError(f"{len(blocks)} blocks are not {repeats} repeats of the same number of stages")
    named = [_tensors(block) for block in blocks]
    for number, tensors in enumerate(named):
        _check_form(named[0], tensors, number)
    stacked = copy.deepcopy(blocks[0])
    twins: dict[int, Tensor] = {}
    for name, first in named[0].items():
        if id(first) not in twins:
            rows = torch.stack([tensors[name].detach() for tensors in named]).view(repeats, stages, *first.shape)
            parameter = isinstance(first, nn.Parameter)
            twins[id(first)] = nn.Parameter(rows, first.requires_grad) if parameter else rows
        _put(stacked, name, twins[id(first)])
    return stacked


def tensors_of(stacked: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer of stacked blocks under one of its names."""
    return dict([*stacked.named_parameters(), *stacked.named_buffers()])


def rows_of(stacked: nn.Module) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """For each block its repeat, its stage, and its tensors by their names in a block, as views of the stacked ones."""
    tensors = {name: tensor.detach() for name, tensor in tensors_of(stacked).items()}
    repeats, stages = next(iter(tensors.values())).shape[:2]
    for repeat in range(repeats):
        for stage in range(stages):
            yield repeat, stage, {name: tensor[repeat, stage] for name, tensor in tensors.items()}


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    parameters = block.named_parameters(remove_duplicate=False)
    return dict([*parameters, *block.named_buffers(remove_duplicate=False)])


def _check_form(first: Mapping[str, Tensor], other: Mapping[str, Tensor], number: int) -> None:
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
