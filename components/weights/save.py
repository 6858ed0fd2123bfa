"""Writer for safetensors files, sharded by size like Hugging Face, with one tensor group in memory at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from torch import Tensor

from drawloom import UserError
from drawloom.components.storage.safetensors.reader import INDEX, SINGLE
from drawloom.components.storage.safetensors.writer import check_writable, create_safetensors_file, format_names
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.load import compute_group_output_specs
from drawloom.ports import Mapper

MAX_NAMES = 30_000  # in a file; keeps the header below the readable size for names of any length


@attrs.frozen
class PlannedFile:
    """Planned file: its name, its writer's rank, and its tensors' specs in order."""

    name: str
    writer: int
    specs: Mapping[str, TensorSpec]


def compute_output_specs(source: TensorSource, mapper: Mapper) -> dict[str, TensorSpec]:
    """Return a mapper's output specs, group by group. Raises UserError if the tensors don't fit it."""
    specs = source.specs()
    try:
        return {
            name: spec for group in mapper.groups for name, spec in compute_group_output_specs(group, specs).items()
        }
    except ValueError as error:
        raise UserError(f"the tensors do not fit the model: {error}") from error


def plan_files(specs_by_writer: Sequence[Mapping[str, TensorSpec]], max_shard: int) -> list[PlannedFile]:
    """
    Plan the files for several writers' tensors. Raises UserError if two writers have a tensor with the same
    name.
    """
    writers: dict[str, int] = {}
    for writer, specs in enumerate(specs_by_writer):
        if duplicates := [name for name in specs if name in writers]:
            first = writers[duplicates[0]]
            raise UserError(f"{format_names(duplicates)} would be written twice, by rank {first} and by rank {writer}")
        check_storable(specs)
        writers |= dict.fromkeys(specs, writer)
    runs = [
        (writer, run)
        for writer, specs in enumerate(specs_by_writer)
        if specs
        for run in split_by_size(specs, max_shard)
    ]
    if len(runs) == 1:
        return [PlannedFile(SINGLE, writer, _select_specs(specs_by_writer[writer], run)) for writer, run in runs]
    count = len(runs)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        PlannedFile(name, w, _select_specs(specs_by_writer[w], run)) for name, (w, run) in zip(names, runs, strict=True)
    ]


def check_storable(specs: Mapping[str, TensorSpec]) -> None:
    """Raise UserError if safetensors files can't store the name, dtype or shape of a tensor."""
    try:
        check_writable(specs)
    except ValueError as error:
        raise UserError(
            f"safetensors files can't store these tensors: {error}; change this name, dtype or shape"
        ) from error


def write_files(folder: Path, files: Sequence[PlannedFile], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write and flush planned files; `tensors`, any shape, arrive in the planned order."""
    for file in files:
        with create_safetensors_file(folder / file.name, file.specs) as writer:
            for expected in file.specs:
                name, tensor = next(tensors)
                if name != expected:
                    raise ValueError(
                        f"tensor {name} came where the plan has {expected}; pass the tensors in the planned order"
                    )
                writer.write(name, tensor)


def write_index_if_several_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write the index (tensor name to file name), if there are several files."""
    if len(files) > 1:
        file_names = {name: file.name for file in files for name in file.specs}
        total = sum(spec.bytes for file in files for spec in file.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def split_by_size(specs: Mapping[str, TensorSpec], max_shard: int) -> list[list[str]]:
    """Split the names, in order, into files with up to `max_shard` bytes; a larger tensor is alone."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and (size + spec.bytes > max_shard or len(shards[-1]) == MAX_NAMES):
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.bytes
    return shards


def _select_specs(specs: Mapping[str, TensorSpec], names: Sequence[str]) -> dict[str, TensorSpec]:
    """Return the specs for these names."""
    return {name: specs[name] for name in names}
