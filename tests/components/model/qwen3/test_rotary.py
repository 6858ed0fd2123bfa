"""Angles of rotary positions."""

import math

import torch

from drawloom.components.model.qwen3.rotary import rotary_angles


def test_angles_are_those_of_the_paper() -> None:
    """At position p channel pair i is turned by p * base^(-2i / head_dim)."""
    positions = torch.tensor([[0, 1, 5], [7, 0, 1000]])
    cos, sin = rotary_angles(positions, 6, 100.0)
    assert cos.shape == sin.shape == (2, 3, 3)
    assert cos.dtype == sin.dtype == torch.float32
    for row in range(2):
        for column in range(3):
            for pair in range(3):
                angle = positions[row, column].item() * 100.0 ** (-2 * pair / 6)
                assert math.isclose(cos[row, column, pair], math.cos(angle), abs_tol=1e-4)
                assert math.isclose(sin[row, column, pair], math.sin(angle), abs_tol=1e-4)
