"""Port for parametrizations, which scale a model's initial values and learning rates with its size."""

from typing import Protocol

import attrs

from drawloom.components.ports.parameter_roles import UNSCALED, Scaling
from drawloom.graph import port


@attrs.frozen
class ModelScaling:
    """
    Factors for a decoder of one size.

    `outer` scales the embedding, the last norm and the head; `matrix`, `residual` and `vector` scale parameters inside
    of layers: matrices, matrices whose outputs are added to the residual stream, and all others.
    """

    outer: Scaling = UNSCALED
    matrix: Scaling = UNSCALED
    residual: Scaling = UNSCALED
    vector: Scaling = UNSCALED
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0


@port
class Parametrization(Protocol):
    """Rule for scaling a decoder relative to a smaller base model, whose best settings it keeps."""

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        """Return the factors for a decoder with this width and depth; all are 1 for the base model."""
        ...
