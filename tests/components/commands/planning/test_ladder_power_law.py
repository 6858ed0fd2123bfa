"""Power laws with intervals."""

import random

import pytest

from drawloom.components.commands.planning.ladder import compute_central_t_quantile, fit_power_law


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)]
)
def test_quantiles_are_the_printed_ones(degrees_of_freedom: int, quantile: float) -> None:
    """Student's two-sided 95% quantiles agree with statistical tables."""
    assert compute_central_t_quantile(0.95, degrees_of_freedom) == pytest.approx(quantile, abs=5e-4)


def test_exact_power_law_has_an_empty_interval() -> None:
    """Points on a power law return it; two different x have no interval."""
    fit = fit_power_law([(x, 3 * x**-0.25) for x in (1.0, 10.0, 100.0)])
    assert fit is not None and fit.coefficient == pytest.approx(3) and fit.exponent == pytest.approx(-0.25)
    assert fit.exponent_low == pytest.approx(fit.exponent_high) and fit.value_at(16.0) == pytest.approx(1.5)
    assert fit_power_law([(1.0, 2.0), (3.0, 1.0), (3.0, 1.1)]) is None


def test_interval_covers_the_exponent_in_95_of_100_samples() -> None:
    """With normal errors in log y, the interval has its nominal coverage, within three standard errors."""
    draw, covered, samples = random.Random(5), 0, 1000
    for _ in range(samples):
        fit = fit_power_law([(x, x**-0.5 * 2.718281828 ** draw.gauss(0, 0.1)) for x in (1.0, 2.0, 4.0, 8.0)])
        assert fit is not None
        covered += fit.exponent_low <= -0.5 <= fit.exponent_high
    assert abs(covered / samples - 0.95) < 3 * (0.95 * 0.05 / samples) ** 0.5
