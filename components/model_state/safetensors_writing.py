"""Tensors into safetensors files, split by size as Hugging Face does."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from drawloom.components.model_state.safetensors_reading import INDEX, SINGLE
from drawloom.components.model_state.tensor_source import TensorKind, TensorSource

MAX_SHARD = 4 * 2**30


def write_safetensors(folder: Path, source: TensorSource, max_shard: int = MAX_SHARD) -> None:
    """
    Write `model.safetensors`, or numbered files of at most `max_shard` bytes of tensors and an index.

    A tensor larger than that has a file to itself. One file's tensors are in memory at a time.
    """
    kinds = source.kinds()
    shards = split(kinds, max_shard)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
    for file, members in zip(names, shards, strict=True):
        tensors = {name: source.tensor(name).cpu().contiguous() for name in members}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {name: file for file, members in zip(names, shards, strict=True) for name in members}
        total = sum(kind.bytes for kind in kinds.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def split(kinds: Mapping[str, TensorKind], max_shard: int) -> list[list[str]]:
    """Names in order, in as few runs as it takes for each to stay within so many bytes; at least one run."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, kind in kinds.items():
        if shards[-1] and size + kind.bytes > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += kind.bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
