"""
Loads weights from files into modules, through a mapper, one tensor group at a time.

Mappers also convert a module's tensors for files.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from drawloom import UserError
from drawloom.components.storage.durable_files import open_untrusted_file
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.safetensors.writer import format_names
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.components.weights.dequantized import BITS, DequantizedSource, TextTensors
from drawloom.components.weights.mapper import (
    convert_one,
    cut_slice,
    distribute_like,
    parallel,
    select_outputs,
    sequential,
)
from drawloom.kernels.weight_formats.eager import STORAGE
from drawloom.ports import (
    LOSS,
    SCORE,
    Mapper,
    QuantizedFormat,
    TensorGroup,
    TensorSlice,
    is_dtensor,
    list_quantized_parameter_formats,
)


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


COMPUTED = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
"""Patterns (fnmatch) for buffers in old folders, which follow from the config; transformers ignores them, too."""


PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections of one expert by the stacked projection."""


@attrs.frozen(slots=False)
class StackedExperts:
    """
    Source in which `X.experts.gate_up_proj` and `X.experts.down_proj` are made of the tensors of single experts.

    Only missing tensors among `needed` are made: of `X.experts.0.gate_proj.weight` and so on, each (outputs, inputs).
    """

    source: TensorSource
    needed: Collection[str]

    @cached_property
    def _expert_names_by_stacked_name(self) -> dict[str, Sequence[Sequence[str]]]:
        """
        Names in files by stacked tensor name: one list with all experts' projections, or two lists for gate and up.
        """
        specs = self.source.specs()
        counts: dict[str, int] = {}
        for name in specs:
            if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.down_proj\.weight", name):
                counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        singles: dict[str, Sequence[Sequence[str]]] = {}
        for name in self.needed:
            layer, _, projection = name.rpartition(".")
            if name not in specs and projection in PARTS and layer in counts:
                experts = [f"{layer}.{expert}" for expert in range(counts[layer])]
                parts = [[f"{expert}.{part}.weight" for expert in experts] for part in PARTS[projection]]
                if all(single in specs for part in parts for single in part):
                    singles[name] = parts
        return singles

    def specs(self) -> Mapping[str, TensorSpec]:
        specs = self.source.specs()
        hidden = {single for parts in self._expert_names_by_stacked_name.values() for part in parts for single in part}
        stacked = {}
        for name, parts in self._expert_names_by_stacked_name.items():
            (outputs, inputs), dtype = specs[parts[0][0]].shape, specs[parts[0][0]].dtype
            stacked[name] = TensorSpec((len(parts[0]), len(parts) * outputs, inputs), dtype)
        return {name: spec for name, spec in specs.items() if name not in hidden} | stacked

    def tensor(self, name: str) -> Tensor:
        if name not in self._expert_names_by_stacked_name:
            return self.source.tensor(name)
        return torch.cat(
            [torch.stack([*map(self.source.tensor, part)]) for part in self._expert_names_by_stacked_name[name]], 1
        )


def open_and_check_folder(
    folder: Path,
    module: nn.Module,
    mapper: Mapper,
    excluded: Collection[str] = (),
    slices: Mapping[str, TensorSlice] = {},
) -> TensorSource:
    """
    Open a folder as a source for `fill_module`, and check the files' headers.

    Raises UserError with all tensors that are missing, unexpected or of another shape. One unexpected tensor is
    accepted if it equals an expected one bit for bit, because it is a tied copy.
    """
    source = TextTensors(open_safetensors_folder(folder), frozenset(mapper.inputs))
    targets = _find_target_tensors(module, mapper, excluded)
    shapes = {name: _unsplit_shape(name, tensor, slices) for name, tensor in targets.items()}
    for name, weight_format in list_quantized_parameter_formats(module).items():
        if name in shapes:
            shapes[name] = weight_format.weight_shape(shapes[name])
    expected = StackedExperts(DequantizedSource(source), mapper.inputs)
    if reasons := list(_find_mismatches(expected, mapper, shapes)):
        raise UserError(f"{folder} does not fit the model: {'; '.join(reasons)}; compare its config.json with [model]")
    return source


def open_dequantized_source(folder: Path, mapper: Mapper) -> TensorSource:
    """Open a folder as a source with the mapper's inputs: dequantized, with stacked experts, the text part alone."""
    inputs = frozenset(mapper.inputs)
    return StackedExperts(DequantizedSource(TextTensors(open_safetensors_folder(folder), inputs)), inputs)


def read_dequantized_output(folder: Path, mapper: Mapper, name: str) -> Tensor:
    """Return one of a mapper's outputs (any shape), from a folder with its inputs."""
    return dict(stream_converted_tensors(open_dequantized_source(folder, mapper), select_outputs(mapper, {name})))[name]


def fill_module(
    source: TensorSource,
    module: nn.Module,
    mapper: Mapper,
    device: torch.device | str = "cpu",
    excluded: Collection[str] = (),
    slices: Mapping[str, TensorSlice] = {},
) -> None:
    """
    Fill a module's parameters and persistent buffers from a mapper's outputs.

    Parameters on the meta device are materialized on `device`, others are filled in place; they keep dtype and
    sharding. Persistent buffers must be materialized. Names in `excluded` stay unchanged. For names in `slices` the
    module has slices. A frozen weight that the module stores in a quantized format is quantized on `device`; if the
    source has this format, and the mapper only moves its rows, it keeps the bits of the source.
    """
    parameters = _find_target_tensors(module, mapper, excluded)
    needed = select_outputs(mapper, parameters)
    formats = {
        name: weight_format
        for name, weight_format in list_quantized_parameter_formats(module).items()
        if name in parameters
    }
    shapes = {name: _unsplit_shape(name, parameters[name], slices) for name in formats}
    quantized = DequantizedSource(source)
    kept = [group for group in needed.groups if _can_convert_storage(group, quantized, formats, shapes)]
    kept_outputs = {name for group in kept for name in group.outputs}
    steps = [
        [_create_storage_mapper(name, formats[name], name in kept_outputs, device) for name in formats],
        [cut_slice(name, slices[name]) for name in needed.outputs if name in slices],
        [distribute_like(name, parameters[name]) for name in needed.outputs if name in parameters],
    ]
    stored = attrs.evolve(quantized, stored=frozenset(name for group in kept for name in group.inputs))
    conversion = sequential(needed, *(parallel(*step) for step in steps))
    for name, tensor in stream_converted_tensors(StackedExperts(stored, needed.inputs), conversion):
        if name in parameters:
            _copy_into_or_replace_parameter(module, parameters[name], tensor, torch.device(device))


def _unsplit_shape(name: str, tensor: Tensor, slices: Mapping[str, TensorSlice]) -> tuple[int, ...]:
    """Return a parameter's shape before it was split over ranks."""
    return slices[name].shape if name in slices else tuple(tensor.shape)


def _can_convert_storage(
    group: TensorGroup,
    source: DequantizedSource,
    formats: Mapping[str, QuantizedFormat],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """
    Return whether a group's conversion can be applied to quantized storage instead of dequantized weights.

    A conversion that only moves rows, such as a stack of experts, is the same for rows of storage. One that moves
    elements of a row does not lead to the shape of the output's storage.
    """
    tensors = [source.quantized_tensors.get(name) for name in group.inputs]
    used = {None if tensor is None else tensor.weight_format.name for tensor in tensors}
    wanted = {formats[name].name if name in formats else None for name in group.outputs}
    if None in used or used != wanted:
        return False
    specs = {name: tensor.storage_spec for name, tensor in source.quantized_tensors.items() if name in group.inputs}
    try:
        return compute_group_output_specs(group, specs) == {
            name: TensorSpec(shapes[name], BITS) for name in group.outputs
        }
    except ValueError:
        return False


def _create_storage_mapper(
    name: str, weight_format: QuantizedFormat, is_stored: bool, device: torch.device | str
) -> Mapper:
    """Return the mapper that quantizes a weight (..., outputs, inputs) on `device`, or moves its stored bits there."""

    def store(weight: Tensor) -> Tensor:
        moved = weight.to(device)
        return moved.view(STORAGE) if is_stored else weight_format.quantize(moved)

    return convert_one(name, store)


def _find_target_tensors(module: nn.Module, mapper: Mapper, excluded: Collection[str]) -> dict[str, Tensor]:
    """Return the model's parameters (without the loss's) and the persistent buffers that the mapper outputs."""
    outputs, others = set(mapper.outputs), set(excluded)
    named = persistent_tensors(module).items()
    tensors = {name: tensor for name, tensor in named if not name.startswith(f"{LOSS}.") and name not in others}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter) or name in outputs}


def _copy_into_or_replace_parameter(module: nn.Module, parameter: Tensor, tensor: Tensor, device: torch.device) -> None:
    """Copy a tensor into a parameter; on the meta device replace it, and its ties, by a materialized one."""
    if not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(tensor)
        return
    moved = tensor.to(device, parameter.dtype)
    real = nn.Parameter(_ensure_own_storage(moved, moved is not tensor), parameter.requires_grad)
    # replaces every reference to the parameter, so that tied parameters stay tied
    for part in module.modules():
        for name, other in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if other is parameter:
                setattr(part, name, real)


def _ensure_own_storage(tensor: Tensor, is_ours: bool) -> Tensor:
    """
    Return a contiguous tensor with its own full storage; a copy if its memory is not `is_ours`, or if it is a partial
    view.
    """
    if is_dtensor(tensor):
        return tensor if is_ours else tensor.clone()
    fills_storage = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_ours and fills_storage else tensor.clone(memory_format=torch.contiguous_format)


def _find_mismatches(source: TensorSource, mapper: Mapper, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield why a source can't fill these parameters: missing, unexpected or wrongly shaped tensors."""
    specs, used = source.specs(), set(mapper.inputs)
    outputs = set(mapper.outputs)
    if nameless := [name for name in shapes if name not in outputs]:
        yield f"parameters without a tensor in the folder: {format_names(nameless)}"
    if missing := [name for name in mapper.inputs if name not in specs]:
        yield f"missing {format_names(missing)}"
    ignored = (*mapper.ignored, SCORE, *COMPUTED)  # the loss loads SCORE
    extra = [name for name in specs if name not in used and not any(fnmatchcase(name, p) for p in ignored)]
    if extra and not _is_tied_copy(source, extra, used):
        yield f"unexpected {format_names(extra)}"
    yield from find_wrong_shapes(select_outputs(mapper, shapes), specs, shapes)


def find_wrong_shapes(
    mapper: Mapper, specs: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield a message with all tensors whose converted shape differs from the parameter's."""
    wrong: list[str] = []
    for group in mapper.groups:
        if any(name not in specs for name in group.inputs):
            continue
        try:
            output_specs = compute_group_output_specs(group, specs)
        except ValueError as error:
            yield str(error)
            continue
        origin = ", ".join(group.inputs)
        pairs = [(spec.shape, shapes[name]) for name, spec in output_specs.items() if name in shapes]
        wrong += [f"{origin} {actual} for {expected}" for actual, expected in pairs if actual != expected]
    if wrong:
        yield f"wrong shape {format_names(wrong)}"


def _is_tied_copy(source: TensorSource, extra: list[str], expected: set[str]) -> bool:
    """
    Return whether the only unexpected tensor equals an expected one bit for bit: folders for tied models may have a
    head.
    """
    specs = source.specs()
    candidates = [name for name in specs if name in expected and specs[name] == specs[extra[0]]]
    return len(extra) == 1 and any(torch.equal(source.tensor(extra[0]), source.tensor(name)) for name in candidates)


WHOLE = 2**24
"""Bytes up to which a file is hashed in full; larger files are sampled, so that a fingerprint takes milliseconds."""

SAMPLES = 256
"""Evenly spaced samples of a large file, WHOLE / SAMPLES bytes each, including its beginning and its end."""


def folder_fingerprint(folder: Path) -> str:
    """Return a hexadecimal SHA-256 over names, sizes and sampled bytes of a folder's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open_untrusted_file(path) as file:
            digest.update(f"{path.name} {file.size}\n".encode())
            for offset, size in _choose_sample_offsets_and_sizes(file.size):
                digest.update(file.read(offset, size))
    return digest.hexdigest()


def _choose_sample_offsets_and_sizes(size: int) -> list[tuple[int, int]]:
    """Return offsets and sizes to hash in a file: all, or SAMPLES evenly spaced pieces with WHOLE bytes together."""
    if size <= WHOLE:
        return [(0, size)]
    part = WHOLE // SAMPLES
    return [(index * (size - part) // (SAMPLES - 1), part) for index in range(SAMPLES)]
