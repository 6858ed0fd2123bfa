"""Contract for the port of parametrizations."""

import math

import attrs

from drawloom.graph.testing import expect
from drawloom.ports import Parametrization


def factors_are_positive_and_finite(parametrization: Parametrization) -> None:
    """Factors for a wider and deeper decoder are positive and finite."""
    scaling = parametrization.compute_scaling_for_size(hidden_size=4096, num_hidden_layers=32)
    roles = (scaling.outer, scaling.head, scaling.matrix, scaling.residual, scaling.vector, scaling.residual_vector)
    for role in roles:
        for name, factor in attrs.asdict(role).items():
            expect(0 < factor < math.inf, f"{name} is multiplied by {factor}")
    for factor in (scaling.residual_multiplier, scaling.logit_multiplier):
        expect(0 < factor < math.inf, f"outputs are multiplied by {factor}")
