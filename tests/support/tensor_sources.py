"""Sources of tensors in memory, and safetensors folders written in this process."""

from collections.abc import Mapping
from pathlib import Path

import attrs
from torch import Tensor

from drawloom.components.ports.weights import MAX_SHARD, Mapper
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.load import stream_converted_tensors
from drawloom.components.weights.save import compute_output_specs, plan_files, write_files, write_index_if_several_files


@attrs.frozen
class InMemoryTensors:
    """Source for tensors in memory, which are not copied."""

    tensors: Mapping[str, Tensor]

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, any shape, detached and not copied."""
        return self.tensors[name].detach()


def write_safetensors(folder: Path, source: TensorSource, mapper: Mapper, max_shard: int = MAX_SHARD) -> None:
    """
    Write `model.safetensors`, or numbered files with at most `max_shard` bytes in tensors, followed by an index.

    A larger tensor has its own file. One mapper group is in memory at a time.
    """
    files = plan_files([compute_output_specs(source, mapper)], max_shard)
    write_files(folder, files, stream_converted_tensors(source, mapper))
    write_index_if_several_files(folder, files)
