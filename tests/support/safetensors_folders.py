"""Safetensors folders written in this process."""

from pathlib import Path

from drawloom.components.ports.weights import MAX_SHARD, Mapper
from drawloom.components.storage.tensor_source import TensorSource
from drawloom.components.weights.convert import stream_converted_tensors
from drawloom.components.weights.save import compute_output_specs, plan_files, write_files, write_index_if_several_files


def write_safetensors(folder: Path, source: TensorSource, mapper: Mapper, max_shard: int = MAX_SHARD) -> None:
    """
    Write `model.safetensors`, or numbered files with at most `max_shard` bytes in tensors, followed by an index.

    A larger tensor has its own file. One mapper group is in memory at a time.
    """
    files = plan_files([compute_output_specs(source, mapper)], max_shard)
    write_files(folder, files, stream_converted_tensors(source, mapper))
    write_index_if_several_files(folder, files)
