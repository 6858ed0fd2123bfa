"""Assigns the tensors of a model to ranks, and writes each rank's share of a safetensors folder."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.rank_errors import run_on_all, run_on_rank0
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import ModelParameter
from drawloom.components.ports.stages import Stages
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.durable_files import TempFolder, begin_folder
from drawloom.components.storage.safetensors.header import CODES, DTYPES, format_names
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.load import stream
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import to_dtype
from drawloom.components.weights.save import (
    MAX_SHARD,
    PlannedFile,
    check_names,
    output_specs,
    plan_files,
    write_files,
    write_index,
)
from drawloom.components.workspace.workspace import get_configs_parallel
from drawloom.graph import UserError


def held(stages: Stages) -> dict[str, ModelParameter]:
    """The model's parameters on this rank, by name."""
    return {name: each for stage in stages.local for name, each in stage.model_parameters().items()}


def buffers(stages: Stages) -> dict[str, ModelParameter]:
    """The model's persistent buffers on this rank, by name."""
    return {name: each for stage in stages.local for name, each in stage.model_buffers().items()}


def holding(parameters: Mapping[str, ModelParameter]) -> dict[str, Any]:
    """Shape and dtype of parameters, by name, as JSON."""
    return {"tensors": {name: [list(each.shape), str(each.dtype)] for name, each in parameters.items()}}


def choose_owners(mapper: Mapper, holdings: Sequence[Mapping[str, Any]]) -> list[int]:
    """
    For each group of a mapper the first rank that holds all of its inputs.

    Replicated tensors, and those of a tied head, are so written once. Raises UserError with the missing parameters,
    those without a Hugging Face name, and those whose shape or dtype differs between ranks.
    """
    held = [each["tensors"] for each in holdings]
    _compare(mapper, held)
    owners = []
    for group in mapper.groups:
        # The first, so that every rank and every run chooses the same.
        able = [rank for rank, tensors in enumerate(held) if tensors.keys() >= set(group.inputs)]
        if not able:
            names = f"{format_names(group.inputs)} become {format_names(group.outputs)} together"
            raise UserError(f"cannot export: {names}, and no rank holds them all; export from fewer pipeline stages")
        owners.append(able[0])
    return owners


def _compare(mapper: Mapper, held: Sequence[Mapping[str, Any]]) -> None:
    """UserError unless the ranks hold exactly the inputs of the mapper, replicated ones with the same spec."""
    wanted = dict.fromkeys(mapper.inputs)
    specs: dict[str, Any] = {}
    for tensors in held:
        for name, spec in tensors.items():
            if specs.setdefault(name, spec) != spec:
                raise UserError(
                    f"{name} is {specs[name]} on one rank and {spec} on another; all ranks must hold the same model"
                )
    lists = [
        ("missing parameters", [name for name in wanted if name not in specs]),
        ("parameters without a Hugging Face name", [name for name in specs if name not in wanted]),
    ]
    if reasons := "; ".join(f"{what} {format_names(names)}" for what, names in lists if names):
        raise UserError(f"cannot export: {reasons}; export from ranks that hold the whole model")


Finish = Callable[[Path, list[PlannedFile]], None]
"""Writes the other files of the folder, after the tensors."""


@attrs.frozen
class Share:
    """One rank's part: the source and mapper of its groups, and the names of the outputs that it writes."""

    source: TensorSource
    mapper: Mapper
    writes: Collection[str]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the rank writes, of any shape. Ranks that share slices call this together."""
        return {name: tensor for name, tensor in stream(self.source, self.mapper) if name in self.writes}


@attrs.frozen
class GatheredParameters:
    """A source of whole parameters: reading one is a collective of the ranks that have slices of it."""

    parameters: Mapping[str, ModelParameter]

    def specs(self) -> Mapping[str, TensorSpec]:
        """Shapes and dtypes of the whole parameters."""
        return {name: TensorSpec(each.shape, each.dtype) for name, each in self.parameters.items()}

    def tensor(self, name: str) -> Tensor:
        """A whole parameter, of any shape."""
        return self.parameters[name].whole()


def share(
    parameters: Mapping[str, ModelParameter], mapper: Mapper, mine: Collection[int], dtype: torch.dtype | None
) -> Share:
    """
    The share of a rank that owns the groups `mine`; `parameters` are those that it holds.

    The rank converts all groups of which it has slices, also those that it does not write: gathering is a collective.
    """
    shared = {name for name, each in parameters.items() if each.is_shared}
    groups = [g for n, g in enumerate(mapper.groups) if n in mine or not shared.isdisjoint(g.inputs)]
    writes = frozenset(name for number in mine for name in mapper.groups[number].outputs)
    chosen = Mapper(tuple(groups))
    # Cast last: a small change that an adapter makes would be lost in a narrow weight. Buffers keep their dtype: what a
    # router's bias changes by is less than the spacing of bfloat16.
    cast = [name for g in groups if not any(parameters[n].is_buffer for n in g.inputs) for name in g.outputs]
    casts = parallel(*(to_dtype(name, dtype) for name in cast)) if dtype else Mapper(())
    return Share(GatheredParameters(parameters), sequential(chosen, casts), writes)


def own_share(
    stages: Stages,
    mapper: Mapper,
    group: Group,
    workspace: Path | None = None,
    dtype: torch.dtype | None = None,
    only_inputs: bool = False,
) -> Share:
    """
    Return this rank's share of what a mapper makes of the parameters of a group's ranks. A collective of the group.

    Ranks exchange what they hold through `workspace`, or through shared memory of their machine. Raises UserError if
    the mapper lacks a parameter, unless `only_inputs` of it are to be written, and as `choose_owners`.
    """
    wanted = set(mapper.inputs)
    parameters = {name: each for name, each in held(stages).items() if not only_inputs or name in wanted}
    parameters |= {name: each for name, each in buffers(stages).items() if name in wanted}
    with get_configs_parallel(holding(parameters), range(group.size), group, workspace) as holdings:
        owners = run_on_rank0(group, lambda: choose_owners(mapper, holdings))
    return share(parameters, mapper, [n for n, owner in enumerate(owners) if owner == group.rank], dtype)


def write_stages(
    target: Path,
    stages: Stages,
    mapper: Mapper,
    finish: Finish,
    group: Group,
    workspace: Path | None = None,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
) -> None:
    """
    Write a folder of what a mapper makes of the parameters that the ranks of a group hold. A collective of the group.

    Raises UserError as `own_share` and `write_shares`.
    """
    mine = own_share(stages, mapper, group, workspace, dtype)
    write_shares(target, mine, group, max_shard, finish)


def write_shares(target: Path, mine: Share, group: Group, max_shard: int, finish: Finish) -> None:
    """
    Write a folder of safetensors files, each rank its share. A collective of the group.

    Rank 0 creates the temporary folder and, after all ranks have written, writes the index, calls `finish` for other
    files, and renames the folder to the target. Raises UserError on every rank if any rank fails, if two would write a
    tensor of the same name, or if the target exists; it is untouched then.
    """
    _, specs = run_on_all(group, lambda: _specs_json(mine), share=lambda specs: specs)
    files = plan_files([_parse_specs(each) for each in specs], max_shard)  # the same on every rank
    # One rank creates the folder, and the others learn its random name.
    temporary, folders = run_on_all(group, lambda: begin_folder(target) if group.rank == 0 else None, share=_path)
    try:
        folder = Path(folders[0])
        run_on_all(group, lambda: _write(folder, [file for file in files if file.writer == group.rank], mine))
        run_on_all(group, lambda: _commit(temporary, files, finish))
    finally:
        if temporary is not None:
            temporary.discard()


def _specs_json(mine: Share) -> dict[str, Any]:
    """Shape and dtype of each tensor that a rank will write, as JSON."""
    specs = {name: spec for name, spec in output_specs(mine.source, mine.mapper).items() if name in mine.writes}
    check_names(specs)
    return {name: [spec.shape, CODES[spec.dtype]] for name, spec in specs.items()}


def _parse_specs(specs: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(shape), DTYPES[code]) for name, (shape, code) in specs.items()}


def _path(temporary: TempFolder | None) -> str:
    return "" if temporary is None else str(temporary.folder)


def _write(folder: Path, files: list[PlannedFile], mine: Share) -> None:
    tensors: Iterator[tuple[str, Tensor]] = stream(mine.source, mine.mapper)
    try:
        write_files(folder, files, ((name, tensor) for name, tensor in tensors if name in mine.writes))
    finally:
        for _ in tensors:  # also after an error: other ranks wait for this one to gather slices
            pass


def _commit(temporary: TempFolder | None, files: list[PlannedFile], finish: Finish) -> None:
    """On the rank that has the temporary folder: complete it, and rename it to the target."""
    if temporary is not None:
        write_index(temporary.folder, files)
        finish(temporary.folder, files)
        temporary.commit()
