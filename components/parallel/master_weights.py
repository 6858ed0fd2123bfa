"""
Master weights for the optimizer, and compute copies for the layers' products.

A module's own parameter is the compute copy, cast from its master once a step. Copies persist, so CUDA graphs can
capture their addresses. For gradient accumulation over microbatches, autograd sums gradients in `Tensor.grad_dtype` on
the copy, or on a GPU the matrix product itself does (`kernels/deferred_grads.py`). After the last microbatch the sum
becomes the master's `.grad` without a copy. Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740,
section 3.1, without loss scaling, unnecessary in bfloat16.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from drawloom.ports import LOSS, MemoryKind, Precision, Shards, TensorSlice, WeightCopies, is_dtensor

Blocks = Callable[[nn.Module], Sequence[nn.Module]]
"""Function that returns the blocks of a stage's module; each block is gathered and reduced by itself."""


@attrs.define(eq=False)
class ParameterStore(WeightCopies):
    """Modules' parameters on one rank, all whole, without DTensors."""

    masters: Mapping[str, nn.Parameter]
    _pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]
    _cast_at: list[int] = attrs.field(factory=list)

    @classmethod
    def from_modules(cls, modules: Iterable[nn.Module], precision: Precision) -> Self:
        """
        Take over modules' real parameters; trained ones are in `precision.parameter`, and tied already.

        A parameter with another dtype in layers is replaced in its module by a copy. A frozen parameter keeps only the
        copy, because no optimizer needs the master.
        """
        copies: dict[nn.Parameter, nn.Parameter] = {}
        masters: dict[str, nn.Parameter] = {}
        for module in modules:
            for name, parameter in list(module.named_parameters(remove_duplicate=False)):
                if not parameter.is_floating_point() or is_dtensor(parameter):
                    continue
                dtype = choose_layer_dtype(name, precision)
                if parameter.dtype != dtype:
                    copy = copies.setdefault(
                        parameter, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    )
                    _replace_parameter(module, name, copy)
                    if parameter.requires_grad:
                        masters[name] = parameter
                for tensor in (parameter, copies.get(parameter)):
                    if tensor is not None and tensor.requires_grad:
                        tensor.grad_dtype = precision.gradient
        return cls(masters, [(parameter, copies[parameter]) for parameter in dict.fromkeys(masters.values())])

    def before_passes(self, only_if_changed: bool = False) -> None:
        """
        Cast the masters to the copies; with `only_if_changed`, only if a step or a load may have changed a master.
        """
        versions = [master._version for master, _ in self._pairs]
        if not self._pairs or (only_if_changed and versions == self._cast_at):
            return
        with torch.no_grad():
            torch._foreach_copy_([copy for _, copy in self._pairs], [master for master, _ in self._pairs])
        self._cast_at = versions

    def after_backward(self) -> None:
        """Move the copies' gradients to the masters, or add them to the masters' existing gradients."""
        for master, copy in self._pairs:
            if copy.grad is not None:
                master.grad = copy.grad if master.grad is None else master.grad.add_(copy.grad)
                copy.grad = None
        # The optimizer is next, and torch's fused optimizers change parameters without a new version number.
        self._cast_at = []

    def local_bytes(self, tensor: Tensor) -> int:
        """Return a tensor's bytes (any shape) on this rank."""
        return tensor.nbytes

    @property
    def slices(self) -> Mapping[str, TensorSlice]:
        """This rank's slices of sharded parameters by name: none, because every parameter is whole."""
        return {}

    @property
    def parameters_summed_in_backward(self) -> Set[str]:
        """The parameters with gradients summed over data-parallel ranks in backward passes: none."""
        return frozenset()

    def get_shards(self, module: nn.Module) -> Shards | None:
        """Return the module's shards or replicas: None, because there are no data-parallel ranks."""
        return None

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return two byte counts: masters with compute copies, and the copies."""
        return {"masters": sum(master.nbytes for master, _ in self._pairs), "compute_copies": self.compute_copy_bytes}

    @property
    def compute_copy_bytes(self) -> int:
        """Bytes of the compute copies among the parameters of the modules."""
        return sum(copy.nbytes for _, copy in self._pairs)


def choose_layer_dtype(name: str, precision: Precision) -> torch.dtype:
    """Return a floating-point parameter's dtype in layers; a loss's parameters are not cast."""
    is_uncast = name.startswith(f"{LOSS}.") or any(fnmatchcase(name, pattern) for pattern in precision.uncast)
    return precision.parameter if is_uncast else precision.compute


def _replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the named parameter in its submodule."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
