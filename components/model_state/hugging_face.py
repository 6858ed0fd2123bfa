"""A model's parameters and a Hugging Face folder: which tensor is which, and whether they fit."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from drawloom.components.model_state.safetensors_reading import open_safetensors_folder
from drawloom.components.model_state.tensor_source import AsType, InMemory, Renamed, TensorSource
from drawloom.graph import UserError


def load_parameters(folder: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """
    Fill tensors, which may be a part of the model's, in place from a folder; dtype and device stay theirs.

    `names` leads from every name of the whole model to the folder's. UserError lists all tensors that are missing,
    unexpected or of another shape. One tensor too many that equals a wanted one bit for bit is a tied copy, and fine.
    """
    source = open_safetensors_folder(folder)
    if reasons := list(_misfits(source, tensors, names)):
        raise UserError(f"{folder} does not fit the model: {'; '.join(reasons)}; compare its config.json with [model]")
    renamed = Renamed(source, names)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(renamed.tensor(name))


def as_hugging_face(tensors: Mapping[str, Tensor], names: Mapping[str, str], dtype: torch.dtype | None) -> TensorSource:
    """A whole model's tensors under the names to write, and in this dtype if any; UserError lists what is not there."""
    missing = [name for name in names if name not in tensors]
    nameless = [name for name in tensors if name not in names]
    if missing or nameless:
        lists = [("missing", missing), ("no name there for", nameless)]
        told = "; ".join(f"{what} {', '.join(which)}" for what, which in lists if which)
        raise UserError(f"the tensors to write are not those of the model: {told}; export where all of it is held")
    renamed = Renamed(InMemory(tensors), {theirs: ours for ours, theirs in names.items()})
    return renamed if dtype is None else AsType(renamed, dtype)


def _misfits(source: TensorSource, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[str]:
    kinds, wanted = source.kinds(), set(names.values())
    if nameless := [name for name in tensors if name not in names]:
        yield f"no name there for {', '.join(nameless)}"
    if missing := [name for name in names.values() if name not in kinds]:
        yield f"missing {', '.join(missing)}"
    extra = [name for name in kinds if name not in wanted]
    if extra and not _is_tied_copy(source, extra, wanted):
        yield f"unexpected {', '.join(extra)}"
    found = {ours: kinds[theirs].shape for ours, theirs in names.items() if theirs in kinds}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name in shapes if found.get(name, shapes[name]) != shapes[name]]
    if wrong:
        yield "wrong shape " + ", ".join(f"{names[name]} {found[name]} for {shapes[name]}" for name in wrong)


def _is_tied_copy(source: TensorSource, extra: list[str], wanted: set[str]) -> bool:
    """Whether the one tensor too many is another once more, bit for bit: some folders of tied models have a head."""
    kinds = source.kinds()
    alike = [name for name in wanted if kinds.get(name) == kinds[extra[0]]]
    return len(extra) == 1 and any(torch.equal(source.tensor(extra[0]), source.tensor(name)) for name in alike)
