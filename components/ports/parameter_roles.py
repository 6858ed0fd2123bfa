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
class Scaling:
    """Factors of a parameter's initial standard deviation and of AdamW's options, by a model's parametrization."""

    initial_std: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


UNSCALED = Scaling()


@attrs.frozen
class Role:
    """
    Role of a parameter.

    Weight decay and orthogonalization (Muon) apply to matrices only, whatever their number of dimensions. In a forward
    pass, a token is multiplied `products` times by the whole parameter: 0 times by an embedding table, and by stacked
    experts the share of experts that it visits. `scaling` applies to random initial values and to the optimizer.
    """

    is_matrix: bool
    initial: Initial
    products: float = 0.0
    scaling: Scaling = UNSCALED


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


@runtime_checkable
class ScalesRoles(Protocol):
    """A module that scales the roles of its own and its submodules' parameters."""

    def scale_role(self, name: str, role: Role) -> Role:
        """Return the scaled role of a parameter by its name inside of the module."""
        ...


def default_role(name: str, parameter: Tensor) -> Role:
    """Return the role of a parameter (any shape) that no module declares, from its name and number of dimensions."""
    if name.endswith("bias"):
        return BIAS_ROLE  # biases of stacked experts have two dimensions
    return MATRIX_ROLE if parameter.ndim >= 2 else SCALE_ROLE


def parameter_roles(module: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yield the name and role of every parameter of a module and its submodules, scaled by the module itself."""
    for path, owner in module.named_modules():
        declared = owner.parameter_roles() if isinstance(owner, DeclaresRoles) else {}
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            role = declared.get(leaf) or default_role(leaf, parameter)
            yield name, module.scale_role(name, role) if isinstance(module, ScalesRoles) else role
