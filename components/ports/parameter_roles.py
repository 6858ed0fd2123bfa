"""Roles of parameters, from which initial values, weight decay and floating-point operations (FLOPs) follow."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

Initial = Literal["normal", "residual"] | float | Callable[[Tensor], Tensor]
"""
Initial values: "normal" random numbers, "residual" with a standard deviation that shrinks with the number of layers, a
constant, or a function of uniform random numbers in [0, 1), of any shape.
"""


@attrs.frozen
class Role:
    """
    Role of a parameter.

    Weight decay and orthogonalization (Muon) apply to matrices only, whatever their number of dimensions. In a forward
    pass, a token is multiplied `products` times by the whole parameter: 0 times by an embedding table, and by stacked
    experts the share of experts that it visits.
    """

    is_matrix: bool
    initial: Initial
    products: float = 0.0


MATRIX_ROLE = Role(True, "normal", 1.0)
RESIDUAL_ROLE = Role(True, "residual", 1.0)
TABLE_ROLE = Role(True, "normal")
BIAS_ROLE = Role(False, 0.0)
SCALE_ROLE = Role(False, 1.0)


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that declares the roles of its own parameters."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Return the roles of the module's own parameters, by their names inside of the module."""
        ...


def default_role(name: str, parameter: Tensor) -> Role:
    """Return the role of a parameter (any shape) that no module declares, from its name and number of dimensions."""
    if name.endswith("bias"):
        return BIAS_ROLE  # biases of stacked experts have two dimensions
    return MATRIX_ROLE if parameter.ndim >= 2 else SCALE_ROLE


def parameter_roles(module: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yield the name and role of every parameter of a module and its submodules."""
    for path, owner in module.named_modules():
        declared = owner.parameter_roles() if isinstance(owner, DeclaresRoles) else {}
        for leaf, parameter in owner.named_parameters(recurse=False):
            yield f"{path}.{leaf}" if path else leaf, declared.get(leaf) or default_role(leaf, parameter)
