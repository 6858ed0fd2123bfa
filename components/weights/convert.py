"""Conversion of a module's tensors by a mapper."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.ports import Mapper, TensorGroup


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers, any shape, by name; a tied tensor is listed once."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}


def convert_tensors(mapper: Mapper, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    Convert tensors, any shape, at once. Drops tensors without a use; raises KeyError if an input is missing.
    """
    return {
        name: tensor
        for group in mapper.groups
        for name, tensor in _convert_group(group, [tensors[name] for name in group.inputs])
    }


def stream_converted_tensors(source: TensorSource, mapper: Mapper) -> Iterator[tuple[str, Tensor]]:
    """Read, convert and yield tensors, any shape, group by group; at most one group is in memory."""
    for group in mapper.groups:
        # popped, so that a tensor is freed as soon as the consumer drops it
        outputs = _convert_group(group, [source.tensor(name) for name in group.inputs])[::-1]
        while outputs:
            yield outputs.pop()


def compute_group_output_specs(group: TensorGroup, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """
    Return a group's output specs, computed on the meta device. Raises ValueError if the inputs can't be converted.
    """
    meta = [torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta") for name in group.inputs]
    try:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in _convert_group(group, meta)}
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{', '.join(group.outputs)} can't be made of {', '.join(group.inputs)}: {reason}") from error


def _convert_group(group: TensorGroup, tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Return a group's converted tensors with their names, without gradients."""
    with torch.no_grad():
        return list(zip(group.outputs, group.convert(tensors), strict=True))
