"""A whole model from and to a Hugging Face folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from drawloom.components.model_state.safetensors_reading import open_safetensors_folder
from drawloom.components.model_state.safetensors_writing import write_safetensors
from drawloom.components.model_state.tensor_source import AsType, InMemory, Renamed, TensorSource
from drawloom.components.model_state.whole_folder import whole_folder
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.model import Model
from drawloom.graph import UserError

MAX_SHARD = 4 * 2**30


def read_hugging_face(folder: Path, names: Mapping[str, str], parameters: Mapping[str, Tensor]) -> None:
    """
    Fill parameters, which may be a part of the model's, in place; dtype and device stay theirs.

    `names` leads from every name of the whole model to the folder's. UserError lists all tensors that are missing,
    unexpected or of another shape. One tensor too many that equals a wanted one bit for bit is a tied copy, and fine.
    """
    source = open_safetensors_folder(folder)
    if reasons := list(_misfits(source, names, parameters)):
        raise UserError(f"{folder} does not fit the model: {'; '.join(reasons)}; compare its config.json with [model]")
    renamed = Renamed(source, names)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(renamed.tensor(name))


def write_hugging_face(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: Model,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard: int = MAX_SHARD,
    dtype: torch.dtype | None = None,
) -> None:
    """
    Write `config.json`, safetensors and the tokenizer into a folder that is whole or absent.

    `tensors` holds every parameter of the model under our names; UserError if not, or if the folder is there already.
    """
    names = model.hugging_face_names()
    source = _as_written(tensors, names, dtype)
    with whole_folder(folder) as aside:
        write_safetensors(aside, source, max_shard)
        if tokenizer is not None:
            tokenizer.save(aside)
        dtypes = {str(kind.dtype).removeprefix("torch.") for kind in source.kinds().values()}
        config = model.hugging_face_config() | ({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _as_written(tensors: Mapping[str, Tensor], names: Mapping[str, str], dtype: torch.dtype | None) -> TensorSource:
    missing, unexpected = [n for n in names if n not in tensors], [n for n in tensors if n not in names]
    if missing or unexpected:
        lists = [("missing", missing), ("unexpected", unexpected)]
        told = "; ".join(f"{what} {', '.join(which)}" for what, which in lists if which)
        raise UserError(f"the tensors to export are not the whole model: {told}; export where all of it is held")
    renamed = Renamed(InMemory(tensors), {theirs: ours for ours, theirs in names.items()})
    return renamed if dtype is None else AsType(renamed, dtype)


def _misfits(source: TensorSource, names: Mapping[str, str], parameters: Mapping[str, Tensor]) -> Iterator[str]:
    kinds, wanted = source.kinds(), set(names.values())
    if nameless := [name for name in parameters if name not in names]:
        yield f"no name there for {', '.join(nameless)}"
    if missing := [name for name in names.values() if name not in kinds]:
        yield f"missing {', '.join(missing)}"
    extra = [name for name in kinds if name not in wanted]
    if extra and not _is_tied_copy(source, extra, wanted):
        yield f"unexpected {', '.join(extra)}"
    found = {ours: kinds[theirs].shape for ours, theirs in names.items() if theirs in kinds}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    wrong = [name for name in shapes if found.get(name, shapes[name]) != shapes[name]]
    if wrong:
        yield "wrong shape " + ", ".join(f"{names[name]} {found[name]} for {shapes[name]}" for name in wrong)


def _is_tied_copy(source: TensorSource, extra: list[str], wanted: set[str]) -> bool:
    """Whether the one tensor too many is another once more, bit for bit: some folders of tied models have a head."""
    kinds = source.kinds()
    alike = [name for name in wanted if kinds.get(name) == kinds[extra[0]]]
    return len(extra) == 1 and any(torch.equal(source.tensor(extra[0]), source.tensor(name)) for name in alike)
