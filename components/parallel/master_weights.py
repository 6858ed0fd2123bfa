"""
Masters and compute copies: what the optimizer keeps of a parameter, and what layers multiply with.

A module's own parameter is the compute copy, cast from its master once a step. Copies persist, so that their addresses
can be captured. The gradients of microbatches are summed in `Tensor.grad_dtype` on the copy, by autograd, or on a GPU
by the product itself (`kernels/deferred_grads.py`); after the last one the sum becomes the master's `.grad`, and
nothing is copied. Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.1, without the loss
scaling, which bfloat16 does not need.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.slices import TensorSlice, is_dtensor
from drawloom.components.ports.stages import LOSS, Shards

Blocks = Callable[[nn.Module], Sequence[nn.Module]]
"""The blocks of a stage's module, each of which is gathered and reduced by itself."""


@attrs.define(eq=False)
class ParameterStore:
    """The parameters of modules on one rank, each of them whole; no DTensors."""

    masters: Mapping[str, nn.Parameter]
    _pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]
    _cast_at: list[int] = attrs.field(factory=list)

    @classmethod
    def of(cls, modules: Iterable[nn.Module], precision: Precision) -> Self:
        """
        Take over the real parameters of modules, all that are trained in `precision.parameter`, and tied already.

        Those that layers compute with in another dtype are replaced, in the modules, by copies; frozen ones keep
        nothing but the copy, for no optimizer needs more.
        """
        copies: dict[nn.Parameter, nn.Parameter] = {}
        masters: dict[str, nn.Parameter] = {}
        for module in modules:
            for name, parameter in list(module.named_parameters(remove_duplicate=False)):
                if not parameter.is_floating_point() or is_dtensor(parameter):
                    continue
                dtype = compute_dtype(name, precision)
                if parameter.dtype != dtype:
                    copy = copies.setdefault(parameter, _copy(parameter, dtype))
                    _replace(module, name, copy)
                    if parameter.requires_grad:
                        masters[name] = parameter
                for each in (parameter, copies.get(parameter)):
                    if each is not None and each.requires_grad:
                        each.grad_dtype = precision.gradient
        return cls(masters, [(parameter, copies[parameter]) for parameter in dict.fromkeys(masters.values())])

    def cast(self, only_if_changed: bool = False) -> None:
        """Cast the masters to the copies; `only_if_changed`, if a step or a load may have changed one since."""
        versions = [master._version for master, _ in self._pairs]
        if not self._pairs or (only_if_changed and versions == self._cast_at):
            return
        with torch.no_grad():
            torch._foreach_copy_([copy for _, copy in self._pairs], [master for master, _ in self._pairs])
        self._cast_at = versions

    def hand_over_gradients(self) -> None:
        """Make the copies' gradients those of the masters, added to what a master has already."""
        for master, copy in self._pairs:
            if copy.grad is not None:
                master.grad = copy.grad if master.grad is None else master.grad.add_(copy.grad)
                copy.grad = None
        # An optimizer comes next, and torch's fused ones change parameters without a change of their versions.
        self._cast_at = []

    def held_bytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor of any shape, which is whole."""
        return tensor.nbytes

    @property
    def slices(self) -> Mapping[str, TensorSlice]:
        """None: each parameter is whole."""
        return {}

    @property
    def summed(self) -> Set[str]:
        """The parameters whose gradients backward passes sum over data-parallel ranks: none."""
        return frozenset()

    def shards_of(self, module: nn.Module) -> Shards | None:
        """None: there are no data-parallel ranks."""
        return None

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of masters and of compute copies that are tensors of their own."""
        return {
            "masters": sum(master.nbytes for master, _ in self._pairs),
            "compute_copies": self.copied_bytes,
        }

    @property
    def copied_bytes(self) -> int:
        """Bytes of the compute copies among the parameters of the modules."""
        return sum(copy.nbytes for _, copy in self._pairs)


def compute_dtype(name: str, precision: Precision) -> torch.dtype:
    """The dtype in which layers use a floating-point parameter; those of a loss, which is no layer, are not cast."""
    keeps = name.startswith(f"{LOSS}.") or any(fnmatchcase(name, pattern) for pattern in precision.uncast)
    return precision.parameter if keeps else precision.compute


def _copy(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
