"""Memory and initial values for a rank's modules: random, or read from a folder, by readers imported only then."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from drawloom import UserError
from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.components.parallel.data_shard import get_local_slice, get_tensor_slice
from drawloom.components.stages.checks import find_initial_folder
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.ports import (
    LOSS,
    Adapter,
    BufferOwner,
    LanguageModel,
    Mapper,
    Model,
    TensorSlice,
    adapter_parameter_names,
    is_dtensor,
    list_quantized_parameter_formats,
)


def check_parameters_fit_device(modules: Iterable[nn.Module], sharding_ranks: int, device: torch.device) -> None:
    """
    Raise UserError if the modules' parameters on the meta device, partitioned over `sharding_ranks`, exceed a device's
    memory.
    """
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.is_meta]
    needed = sum(parameter.nbytes for parameter in parameters) // sharding_ranks
    if needed > (capacity := get_device_memory(device)):
        raise UserError(
            f"the parameters of this rank take {format_decimal_byte_size(needed)}, and its device, {device}, has "
            f"{format_decimal_byte_size(capacity)}; use a smaller model, or more ranks along "
            "data_shard, tensor or pipeline"
        )


def get_device_memory(device: torch.device) -> int:
    """Return a device's total memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@attrs.frozen(slots=False)
class InitialValues:
    """
    Initializer for a rank's modules, with weights from a folder, or random values by seed and name.

    `splits` are the slices of parameters split over tensor and expert ranks. A rank fills only its slice of a sharded
    parameter.
    """

    model: Model
    seed: int
    device: torch.device
    weights: Path | None
    splits: Mapping[str, TensorSlice]

    def allocate_and_fill_modules(self, modules: Iterable[nn.Module]) -> None:
        """Fill modules' parameters and buffers; allocate them, unless parameters are in host memory already."""
        for module in modules:
            # Weights of a folder are read parameter by parameter, without a second copy of the model.
            if self.folder is None or any(map(is_dtensor, module.parameters())):
                module._apply(self._allocate_if_meta)  # type: ignore[no-untyped-call]
            allocate_and_fill_buffers(module, self.device, self.seed)
            if (loss_module := getattr(module, LOSS, None)) is not None:
                allocate_and_fill_parameters(LOSS, loss_module, self.device, self.seed)
            if self.folder is not None:
                self._read_weights(self.folder, module)
            else:
                self._draw_random_weights(module)

    def _allocate_if_meta(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor on the device in place of one on the meta device; others stay."""
        return torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor

    def initialize_adapters_on_all_ranks(self, modules: Iterable[nn.Module]) -> None:
        """
        Fill the adapters' parameters; a collective over ranks with shared weights, because DoRA reads whole weights.
        """
        from drawloom.components.weights.adapted import materialize_and_initialize_adapters

        for module in modules:
            materialize_and_initialize_adapters(module, self.device, self._fill_slice_with_normal)

    def read_adapters(self, folder: Path, modules: Iterable[nn.Module], adapters: Sequence[Adapter]) -> None:
        """Fill the adapters' parameters from an adapter's folder."""
        from drawloom.components.weights.adapter_folder import AdapterFolder

        AdapterFolder.read(folder).fill(modules, self.model, adapters, self.folder, self.device, self.splits)

    def fingerprint_frozen_source(self, parameters: Iterable[nn.Parameter]) -> str:
        """Fingerprint the weights that the frozen parameters come from; "" if all parameters are trained."""
        if all(parameter.requires_grad for parameter in parameters):
            return ""
        if self.folder is None:
            return f"seed {self.seed}"
        from drawloom.components.weights.load import folder_fingerprint

        return folder_fingerprint(self.folder)

    def read_or_draw_frozen_values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a whole parameter's initial values with this shape and dtype, not rounded to a quantized format."""
        if self.folder is None:
            return self._draw_whole_parameter(name, shape, dtype)
        from drawloom.components.weights.load import read_dequantized_output

        return read_dequantized_output(self.folder, self._folder_to_parameters_mapper, name).to(self.device, dtype)

    def format_changed_source_error(self) -> str:
        """Return the error message for a resumed run whose frozen parameters come from other weights."""
        weights = f"the weights in {self.folder}" if self.folder else "the random weights of this seed"
        return f"{weights} are not the weights that the run started from; name the run's folder in stages.weights"

    @property
    def folder(self) -> Path | None:
        """The initial weights' folder: the recipe's, or the model's own."""
        return find_initial_folder(self.weights, self.model)

    @cached_property
    def _folder_to_parameters_mapper(self) -> Mapper:
        """The mapper from the folder's tensors to parameters. Raises UserError for a model without one."""
        if not isinstance(self.model, LanguageModel):
            raise UserError(f"weights: {type(self.model).__name__} can't load a folder; leave weights out", 2)
        return self.model.hugging_face_mapper().inverse()

    def _read_weights(self, folder: Path, module: nn.Module) -> None:
        """Load a module's parameters from the folder, except for adapters."""
        from drawloom.components.weights.load import fill_module, open_and_check_folder

        mapper = self._folder_to_parameters_mapper
        excluded = adapter_parameter_names(module)
        try:
            source = open_and_check_folder(folder, module, mapper, excluded, self.splits)
            fill_module(source, module, mapper, self.device, excluded, self.splits)
        except UserError as error:
            prefix = "weights: " if self.weights else ""  # otherwise the folder is not in this setting
            raise UserError(f"{prefix}{error}", error.exit_code) from error

    def _draw_random_weights(self, module: nn.Module) -> None:
        """Fill a module's parameters with random values, except for adapters and loss."""
        in_adapters, formats = adapter_parameter_names(module), list_quantized_parameter_formats(module)
        for name, parameter in module.named_parameters():
            if name.startswith(f"{LOSS}.") or name in in_adapters:
                continue
            local, shard = parameter.data, None
            if is_dtensor(parameter):
                local, shard = get_local_slice(parameter), get_tensor_slice(parameter)
            tensor_slice = TensorSlice.compose(self.splits.get(name), shard)
            if (weight_format := formats.get(name)) is None:
                drawn = local if local.device.type == self.device.type else torch.empty_like(local, device=self.device)
                self.model.initialize_parameter(name, drawn, self.seed, tensor_slice)
                if drawn is not local:
                    local.copy_(drawn)
                continue
            # A format may have blocks of several rows, which a slice could cut.
            stored_slice = tensor_slice or TensorSlice.whole(tuple(local.shape))
            whole = self._draw_whole_parameter(name, weight_format.weight_shape(stored_slice.shape), local.dtype)
            local.copy_(weight_format.quantize(whole)[stored_slice.index()])

    def _draw_whole_parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return random values for a whole parameter with this shape."""
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        self.model.initialize_parameter(name, whole, self.seed, None)
        return whole

    def _fill_slice_with_normal(self, name: str, parameter: nn.Parameter, std: float) -> None:
        """Fill this rank's slice of an adapter's parameter (any shape) with normal values, the same for any ranks."""
        tensor_slice = self.splits.get(name) or TensorSlice.whole(tuple(parameter.shape))
        key = derive_seed(self.seed, "initial weights", name)
        fill_normal(parameter.data, key, std, tensor_slice.shape, tensor_slice.offsets)


Tensors = Callable[[nn.Module], Iterator[tuple[str, Tensor]]]
"""Function that yields the names and tensors of a module that its `reset_parameters()` has to fill."""


def allocate_and_fill_buffers(module: nn.Module, device: torch.device, seed: int) -> None:
    """
    Allocate a module's buffers, persistent or not, and fill them by their owners' `reset_parameters()`.

    Random values depend on the seed and the owner's name, and the process's generators keep their state. The owner's
    own parameters are allocated as well. Raises UserError if an owner does not fill all its buffers.
    """
    for name, owner in module.named_modules():
        if any(True for _ in _list_own_buffers(owner)):
            _allocate_and_fill_by_reset(name, owner, device, derive_seed(seed, "buffers", name), _list_own_buffers)


def allocate_and_fill_parameters(name: str, module: nn.Module, device: torch.device, seed: int) -> None:
    """
    Allocate the parameters and buffers of the module called `name`, and fill them by their owners'
    `reset_parameters()`.

    Random values depend on the seed and the owner's name. Raises UserError if an owner does not fill all its tensors.
    """
    for path, owner in module.named_modules(prefix=name):
        if any(True for _ in _list_tensors(owner)):
            _allocate_and_fill_by_reset(path, owner, device, derive_seed(seed, "initial weights", path), _list_tensors)


def _allocate_and_fill_by_reset(name: str, owner: nn.Module, device: torch.device, seed: int, tensors: Tensors) -> None:
    """Allocate an owner's tensors and fill them by `reset_parameters()`; UserError if a tensor is left unfilled."""
    owner.to_empty(device=device, recurse=False)
    # An inherited reset_parameters() may skip a tensor. A tensor that it fills has the same values, whether its
    # elements were 0 or 1 before.
    first, second = (_get_values_after_reset(name, owner, device, seed, before, tensors) for before in (0, 1))
    if unfilled := [key for key, value in first.items() if not torch.equal(value, second[key])]:
        raise _create_fill_error(name, owner, unfilled, "has a reset_parameters() that does not fill them")


def _get_values_after_reset(
    name: str, owner: nn.Module, device: torch.device, seed: int, initial_value: int, tensors: Tensors
) -> dict[str, Tensor]:
    """Set all tensors to `initial_value`, call the owner's `reset_parameters()`, and return the tensors' copies."""
    if not isinstance(owner, BufferOwner):
        raise _create_fill_error(
            name, owner, [key for key, _ in tensors(owner)], "has no reset_parameters() that fills them"
        )
    with torch.no_grad(), device, _seed_generators(device, seed):
        for _, tensor in tensors(owner):
            tensor.fill_(initial_value)
        owner.reset_parameters()
    return {key: tensor.detach().clone() for key, tensor in tensors(owner)}


def _list_own_buffers(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return owner.named_buffers(recurse=False)


def _list_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(owner.named_parameters(recurse=False), _list_own_buffers(owner))


@contextmanager
def _seed_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random generators in this context, and restore their state afterwards."""
    # The process's generators keep their state, or dropout would depend on which modules a rank builds. manual_seed
    # seeds the generators of all devices; fork_rng forks that of the CPU by default.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _create_fill_error(name: str, owner: nn.Module, tensor_names: list[str], reason: str) -> UserError:
    """Return an error for tensors an owner's `reset_parameters()` does not fill; `reason` completes the sentence."""
    where = f"the module {name} ({type(owner).__name__})" if name else f"the module {type(owner).__name__}"
    kind = "buffers" if set(tensor_names) <= {key for key, _ in _list_own_buffers(owner)} else "tensors"
    return UserError(
        f"{where} registers the {kind} {', '.join(tensor_names)}, but {reason}: it is built without memory, so the "
        "values its constructor writes are lost",
        exit_code=2,
    )
