"""Roles of parameters, from which initial values, weight decay and FLOPs follow, and how they scale with size."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

from drawloom.graph import port

Initial = Literal["normal"] | float | Callable[[Tensor], Tensor]
"""
Initial values: "normal" random numbers, a constant, or a function of uniform random numbers in [0, 1), of any shape.
"""


@attrs.frozen
class Scaling:
    """
    Factors of a parameter's initial standard deviation and of AdamW's options, by a model's parametrization.

    Decoupled weight decay is divided by `lr`, so that a step's decay stays the same. `width_ratio` is the factor
    between the sides of a matrix and of the base model's matrix.
    """

    initial_std: float = 1.0
    lr: float = 1.0
    eps: float = 1.0
    width_ratio: float = 1.0

    def fold_multiplier(self, multiplier: float) -> "Scaling":
        """
        Return the factors with which a parameter is `multiplier` times as large, at the start and after every step.

        Its gradient is 1 / `multiplier` times as large (Yang et al. 2022, arXiv 2203.03466, lemma J.1).
        """
        return Scaling(self.initial_std * multiplier, self.lr * multiplier, self.eps / multiplier, self.width_ratio)


UNSCALED = Scaling()


@attrs.frozen
class Role:
    """
    Role of a parameter.

    Weight decay and orthogonalization (Muon) apply to matrices only, whatever their number of dimensions. In a forward
    pass, a token is multiplied `products` times by the whole parameter: 0 times by an embedding table, and by stacked
    experts the share of experts that it visits. Outputs of a layer with `is_residual` are added to the residual stream;
    the standard deviation of its random initial values shrinks with the number of layers. `scaling` applies to random
    initial values and to the optimizer.
    """

    is_matrix: bool
    initial: Initial
    products: float = 0.0
    scaling: Scaling = UNSCALED
    is_residual: bool = False


MATRIX_ROLE = Role(True, "normal", 1.0)
RESIDUAL_ROLE = Role(True, "normal", 1.0, is_residual=True)
TABLE_ROLE = Role(True, "normal")
BIAS_ROLE = Role(False, 0.0)
RESIDUAL_BIAS_ROLE = Role(False, 0.0, is_residual=True)
SCALE_ROLE = Role(False, 1.0)


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that declares the roles of its own parameters."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Return the roles of the module's own parameters, by their names inside of the module."""


@runtime_checkable
class ScalesRoles(Protocol):
    """A module that scales the roles of its own and its submodules' parameters."""

    def role_with_scaling(self, name: str, role: Role) -> Role:
        """Return the scaled role of a parameter by its name inside of the module."""


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
            yield name, module.role_with_scaling(name, role) if isinstance(module, ScalesRoles) else role


@attrs.frozen
class ModelScaling:
    """
    Factors for a decoder of one size.

    `outer` scales the embedding and the last norm, and `head` the head. Inside of layers, `residual` and
    `residual_vector` scale the matrices and biases whose outputs are added to the residual stream, and `matrix` and
    `vector` all others. `residual_multiplier` scales these outputs, and `logit_multiplier` the head's.
    """

    outer: Scaling = UNSCALED
    head: Scaling = UNSCALED
    matrix: Scaling = UNSCALED
    residual: Scaling = UNSCALED
    vector: Scaling = UNSCALED
    residual_vector: Scaling = UNSCALED
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    def fold_multipliers(self) -> "ModelScaling":
        """Return factors for an equal model without multipliers of outputs: its weights are multiplied instead."""
        return attrs.evolve(
            self,
            head=self.head.fold_multiplier(self.logit_multiplier),
            residual=self.residual.fold_multiplier(self.residual_multiplier),
            residual_vector=self.residual_vector.fold_multiplier(self.residual_multiplier),
            residual_multiplier=1.0,
            logit_multiplier=1.0,
        )


@port
class Parametrization(Protocol):
    """Rule for scaling a decoder relative to a smaller base model, whose best settings it keeps."""

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        """Return the factors for a decoder with this width and depth; all are 1 for the base model."""
