"""The noise keeps the contract of features; `drawloom_check_port` is one of drawloom's fixtures."""

from collections.abc import Callable

from drawloom_weight_noise.noise import WeightNoise

from drawloom.ports import StageFeature


def test_noise_keeps_the_contract_of_its_port(drawloom_check_port: Callable[..., None]) -> None:
    """The feature behaves as drawloom requires of every feature."""
    drawloom_check_port(WeightNoise, StageFeature)
