"""Tensors through a mapper: all of them, one group after another, or only their shapes."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec


def convert(mapper: Mapper, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors at once; KeyError if one is missing, and what the mapper does not take is left out."""
    return {
        name: tensor
        for group in mapper.groups
        for name, tensor in _convert(group, [tensors[name] for name in group.inputs])
    }


def stream(source: TensorSource, mapper: Mapper) -> Iterator[tuple[str, Tensor]]:
    """One tensor after another, group by group; no more than one group is in memory."""
    for group in mapper.groups:
        given = _convert(group, [source.tensor(name) for name in group.inputs])[::-1]
        while given:
            yield given.pop()


def kinds_given(group: TensorGroup, kinds: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What a group will give, found without reading anything; ValueError if it can't be done with such tensors."""
    meta = [torch.empty(kinds[name].shape, dtype=kinds[name].dtype, device="meta") for name in group.inputs]
    try:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in _convert(group, meta)}
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{', '.join(group.outputs)} can't be made of {', '.join(group.inputs)}: {reason}") from error


def _convert(group: TensorGroup, tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    with torch.no_grad():
        return list(zip(group.outputs, group.convert(tensors), strict=True))
