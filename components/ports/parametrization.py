"""Port for parametrizations, which scale a model's initial values and learning rates with its size."""

from typing import Protocol

import attrs

from drawloom.components.ports.parameter_roles import UNSCALED, Scaling
from drawloom.graph import port


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
        ...
