"""What the port of models that count their operations promises."""

import math

from drawloom.components.ports.flops import CountsFlops
from drawloom.graph.testing import expect


def operations_are_numbers_above_zero(model: CountsFlops) -> None:
    """Each parameter that a token is multiplied by, and attention, takes a positive and finite number of operations."""
    flops = model.forward_flops()
    expect(bool(flops.by_parameter), "no parameter takes an operation")
    for what, count in (*flops.by_parameter.items(), *flops.per_pair.items()):
        expect(0 < count < math.inf, f"{what} takes {count} operations")


def frozen_parameters_cost_a_third_less(model: CountsFlops) -> None:
    """A step without gradients of weights has two products of three."""
    flops = model.forward_flops()
    pairs = dict.fromkeys(flops.per_pair, 0)
    whole, frozen = flops.of_training(1, pairs), flops.of_training(1, pairs, flops.by_parameter.keys())
    expect(math.isclose(3 * frozen, 2 * whole), f"{frozen} operations with frozen weights, {whole} with trained ones")
