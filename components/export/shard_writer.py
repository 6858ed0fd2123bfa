"""Assignment from a model's tensors to ranks, and writer for a rank's share of a safetensors folder."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.storage.safetensors.writer import CODES, DTYPES, format_names
from drawloom.components.storage.temp_folders import TempFolder, create_temp_folder
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.load import stream_converted_tensors
from drawloom.components.weights.mapper import parallel, sequential, to_dtype
from drawloom.components.weights.save import (
    PlannedFile,
    check_storable,
    compute_output_specs,
    plan_files,
    write_files,
    write_index_if_several_files,
)
from drawloom.ports import LOSS, Group, Mapper, ModelParameter, Stages


def parameters_by_name(stages: Stages) -> dict[str, ModelParameter]:
    """Return the parameters on this rank by name: the model's, and the loss's with the prefix `loss.`."""
    return {name: param for stage in stages.local for name, param in stage.gatherable_parameters().items()}


def choose_owner_by_mapper_group(mapper: Mapper, specs_by_rank: Sequence[Mapping[str, Any]]) -> list[int]:
    """
    Return the owner for every mapper group: the first rank that has all the group's inputs, by name.

    Replicated tensors, and a tied head, are thus written once. Raises UserError with missing parameters,
    parameters without a Hugging Face name, and parameters with different shapes or dtypes on different ranks.
    """
    _check_ranks_match_mapper_inputs(mapper, specs_by_rank)
    owners = []
    for group in mapper.groups:
        # the first, so that the choice is the same on every rank and in every run
        able = [rank for rank, tensors in enumerate(specs_by_rank) if tensors.keys() >= set(group.inputs)]
        if not able:
            names = f"{format_names(group.inputs)} become {format_names(group.outputs)} together"
            raise UserError(f"cannot export: {names}, and no rank holds them all; export from fewer pipeline stages")
        owners.append(able[0])
    return owners


def _check_ranks_match_mapper_inputs(mapper: Mapper, specs_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """
    Raise UserError unless the ranks have exactly the mapper's inputs, with equal specs for replicated
    parameters.
    """
    expected = dict.fromkeys(mapper.inputs)
    specs: dict[str, Any] = {}
    for tensors in specs_by_rank:
        for name, spec in tensors.items():
            if specs.setdefault(name, spec) != spec:
                raise UserError(
                    f"{name} is {specs[name]} on one rank and {spec} on another; all ranks must hold the same model"
                )
    reasons: list[str] = []
    if missing := [name for name in expected if name not in specs]:
        reasons.append(f"no rank has {format_names(missing)}; export from ranks with the whole model")
    if unnamed := [name for name in specs if name not in expected]:
        reasons.append(f"{format_names(unnamed)} have no Hugging Face name; complete the model's mapper")
    if reasons:
        raise UserError("cannot export: " + "\n".join(reasons))


Finish = Callable[[Path, list[PlannedFile]], None]
"""Function that writes the other files of the folder, after the tensors."""


@attrs.frozen
class Share:
    """One rank's share: the source and mapper for its groups, and its output names."""

    source: TensorSource
    mapper: Mapper
    writes: Collection[str]

    def gather_and_convert_tensors(self) -> dict[str, Tensor]:
        """Return all tensors written by the rank, any shape. Ranks that share slices call this together."""
        return {
            name: tensor for name, tensor in stream_converted_tensors(self.source, self.mapper) if name in self.writes
        }


@attrs.frozen
class GatheredParameters:
    """Source for whole parameters; reading one is a collective over the ranks with its slices."""

    parameters: Mapping[str, ModelParameter]

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(param.shape, param.dtype) for name, param in self.parameters.items()}

    def tensor(self, name: str) -> Tensor:
        return self.parameters[name].gather_whole()


def make_share(
    parameters: Mapping[str, ModelParameter], mapper: Mapper, owned_groups: Collection[int], dtype: torch.dtype | None
) -> Share:
    """
    Return a rank's share: the mapper groups with indices `owned_groups`, from the rank's `parameters`.

    The rank also converts groups that it has slices for but does not write, because gathering is a
    collective.
    """
    shared = {name for name, param in parameters.items() if param.is_divided_among_ranks}
    groups = [g for n, g in enumerate(mapper.groups) if n in owned_groups or not shared.isdisjoint(g.inputs)]
    writes = frozenset(name for number in owned_groups for name in mapper.groups[number].outputs)
    chosen = Mapper(tuple(groups))
    # Cast last, because a narrow weight would lose small changes of an adapter. Buffers keep their dtype, because the
    # bias of a router changes by less than the spacing of bfloat16.
    cast = [name for g in groups if not any(parameters[n].is_buffer for n in g.inputs) for name in g.outputs]
    casts = parallel(*(to_dtype(name, dtype) for name in cast)) if dtype else Mapper(())
    return Share(GatheredParameters(parameters), sequential(chosen, casts), writes)


def make_share_on_all_ranks(
    stages: Stages,
    mapper: Mapper,
    group: Group,
    dtype: torch.dtype | None = None,
    only_inputs: bool = False,
) -> Share:
    """
    Return this rank's share of a mapper's outputs. A collective over the group.

    Raises UserError like `choose_owner_by_mapper_group`, for model parameters unknown to the mapper too, unless
    `only_inputs`.
    """
    inputs = set(mapper.inputs)
    parameters = {
        name: param
        for name, param in parameters_by_name(stages).items()
        if name in inputs or not (only_inputs or name.startswith(f"{LOSS}."))
    }
    for stage in stages.local:
        buffers = stage.persistent_buffers()
        parameters |= {name: ModelParameter(buffers[name], is_buffer=True) for name in buffers if name in inputs}
    own = {name: [list(param.shape), str(param.dtype)] for name, param in parameters.items()}
    specs_by_rank = group.gather_json(own)
    owners = run_on_rank0(group, lambda: choose_owner_by_mapper_group(mapper, specs_by_rank))
    return make_share(parameters, mapper, [n for n, owner in enumerate(owners) if owner == group.rank], dtype)


def gather_tensors_on_first_rank(collect: Callable[[], Mapping[str, Tensor]], group: Group) -> dict[str, Tensor]:
    """
    Gather every rank's `collect()`, named tensors with any shape, on the first rank; other ranks get none.

    A collective. The tensors have any dtype, and arrive on the CPU; other ranks have one at a time in memory. Raises
    the error of a rank on all ranks.
    """
    own, specs_by_rank = run_and_gather_on_all_ranks(
        group,
        collect,
        lambda tensors: {name: [tensor.shape, CODES[tensor.dtype]] for name, tensor in tensors.items()},
    )
    gathered: dict[str, Tensor] = {}
    for rank, specs in enumerate(specs_by_rank):
        for name, (shape, code) in specs.items():
            is_own = rank == group.rank
            tensor = own[name].detach().cpu().contiguous() if is_own else torch.empty(shape, dtype=DTYPES[code])
            group.broadcast(tensor.view(-1).view(torch.uint8), rank)
            if group.rank == 0:
                gathered[name] = tensor
    return gathered


def write_safetensors_folder_collectively(
    target: Path, own: Share, group: Group, max_shard: int, finish: Finish
) -> None:
    """
    Write a folder with safetensors files, with a share from every rank. A collective over the group.

    Rank 0 creates the temporary folder and, after all ranks have written, writes the index, calls `finish` for
    other files, and renames the folder to the target. Raises UserError on every rank if any rank fails, if two
    ranks would write a tensor with the same name, or if the target exists; the target is then unchanged.
    """
    _, specs_by_rank = run_and_gather_on_all_ranks(
        group, lambda: _describe_own_specs_as_json(own), to_json=lambda specs: specs
    )
    specs_by_writer = [
        {name: TensorSpec(tuple(shape), DTYPES[code]) for name, (shape, code) in specs.items()}
        for specs in specs_by_rank
    ]
    files = plan_files(specs_by_writer, max_shard)  # the same on every rank
    # one rank creates the folder, and shares its random name
    temporary, folders = run_and_gather_on_all_ranks(
        group,
        lambda: create_temp_folder(target) if group.rank == 0 else None,
        to_json=lambda created: "" if created is None else str(created.folder),
    )
    try:
        folder = Path(folders[0])
        run_and_gather_on_all_ranks(
            group,
            lambda: _gather_and_write_own_files(folder, [file for file in files if file.writer == group.rank], own),
        )
        run_and_gather_on_all_ranks(group, lambda: _commit_folder(temporary, files, finish))
    finally:
        if temporary is not None:
            temporary.discard()


def _describe_own_specs_as_json(own: Share) -> dict[str, Any]:
    """Return shapes and dtypes for the tensors a rank will write, as JSON."""
    specs = {name: spec for name, spec in compute_output_specs(own.source, own.mapper).items() if name in own.writes}
    check_storable(specs)
    return {name: [spec.shape, CODES[spec.dtype]] for name, spec in specs.items()}


def _gather_and_write_own_files(folder: Path, files: list[PlannedFile], own: Share) -> None:
    tensors: Iterator[tuple[str, Tensor]] = stream_converted_tensors(own.source, own.mapper)
    try:
        write_files(folder, files, ((name, tensor) for name, tensor in tensors if name in own.writes))
    finally:
        for _ in tensors:  # also after an error, because other ranks wait for this one to gather slices
            pass


def _commit_folder(temporary: TempFolder | None, files: list[PlannedFile], finish: Finish) -> None:
    """Complete the temporary folder, and rename it to the target, on the folder's rank."""
    if temporary is not None:
        write_index_if_several_files(temporary.folder, files)
        finish(temporary.folder, files)
        temporary.commit()
