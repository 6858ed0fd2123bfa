"""Contract for the port of models that count their floating-point operations (FLOPs)."""

import math

from drawloom.components.ports.flops import CountsFlops
from drawloom.graph.testing import expect


def flops_are_positive_and_finite(model: CountsFlops) -> None:
    """Parameters that multiply a token, and attention, take a positive and finite number of operations."""
    flops = model.forward_flops()
    expect(bool(flops.by_parameter), "no parameter takes an operation")
    for name, count in (*flops.by_parameter.items(), *flops.per_pair.items()):
        expect(0 < count < math.inf, f"{name} takes {count} operations")
    expect(0 <= flops.per_token < math.inf, f"a token takes {flops.per_token} operations beside parameters")


def frozen_parameters_cost_two_of_three_products(model: CountsFlops) -> None:
    """A step without gradients of weights computes two of three matrix products."""
    flops = model.forward_flops()
    pairs = dict.fromkeys(flops.per_pair, 0)
    both = flops.count_training_flops(1, pairs), flops.count_training_flops(1, pairs, flops.by_parameter.keys())
    trained, frozen = (count - 3 * flops.per_token for count in both)
    expect(math.isclose(3 * frozen, 2 * trained), f"{frozen} operations with frozen weights, {trained} with trained")
