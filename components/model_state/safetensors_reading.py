"""Tensors from a Hugging Face folder of safetensors files, one at a time."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drawloom.components.model_state.tensor_source import TensorKind
from drawloom.graph import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@attrs.frozen
class SafetensorsFolder:
    """A source of the tensors of a folder; `places` says which file holds each."""

    folder: Path
    places: Mapping[str, str]
    found: Mapping[str, TensorKind]

    def kinds(self) -> Mapping[str, TensorKind]:
        return self.found

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.folder / self.places[name], framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def open_safetensors_folder(folder: Path) -> SafetensorsFolder:
    """
    Read the headers of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    UserError lists everything by which index and files differ.
    """
    if (folder / SINGLE).is_file():
        kinds = _read_header(folder / SINGLE)
        return SafetensorsFolder(folder, dict.fromkeys(kinds, SINGLE), kinds)
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}; write the path of a Hugging Face model folder")
    places = _read_index(folder / INDEX)
    headers = {file: _read_header(folder / file) for file in dict.fromkeys(places.values())}
    if reasons := list(_differences(places, headers)):
        raise UserError(f"{folder / INDEX} and its files differ: {'; '.join(reasons)}; copy the folder again")
    return SafetensorsFolder(folder, places, {name: headers[file][name] for name, file in places.items()})


def _read_header(path: Path) -> dict[str, TensorKind]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {name: TensorKind(tuple(s.get_shape()), _dtype(s.get_dtype(), path)) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} can't be read as safetensors ({error}); copy the file again") from error


def _dtype(code: str, path: Path) -> torch.dtype:
    if code not in DTYPES:
        raise UserError(f"{path} holds tensors of type {code}, which can't be read; convert it to bfloat16")
    return DTYPES[code]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name; a file name that leads out of the folder is refused."""
    try:
        index = json.loads(path.read_text("utf-8"), object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); copy the file again") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{path} has no weight_map; copy the file again")
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\\" in file:
            raise UserError(f"{path} places {name} in {file!r}, which is no file of the folder; take another copy")
    return places


def _without_repeats(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{path} names {', '.join(repeated)} more than once; copy the file again")
    return dict(pairs)


def _differences(places: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorKind]]) -> Iterator[str]:
    if missing := [f"{name} (in {file})" for name, file in places.items() if name not in headers[file]]:
        yield f"missing {', '.join(missing)}"
    held = [(name, file) for file, kinds in headers.items() for name in kinds]
    if unknown := [f"{name} (in {file})" for name, file in held if name not in places]:
        yield f"unexpected {', '.join(unknown)}"
    if double := [f"{name} (also in {file})" for name, file in held if places.get(name, file) != file]:
        yield f"duplicate {', '.join(double)}"
