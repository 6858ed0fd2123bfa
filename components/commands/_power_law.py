"""Power laws fitted to points by least squares in logarithms, with confidence intervals."""

import math
import statistics
from collections.abc import Sequence

from drawloom.graph.cli.result import output, output_class

CONFIDENCE = 0.95
MIN_POINTS = 3
"""Two points leave no degree of freedom for an interval."""


@output_class
class PowerLaw:
    """Fit y = coefficient * x ** exponent."""

    coefficient: float = output("value at x = 1")
    exponent: float = output("slope of log y over log x")
    exponent_low: float = output("lower end of the exponent's 95% confidence interval")
    exponent_high: float = output("upper end of the exponent's 95% confidence interval")

    def value_at(self, x: float) -> float:
        """Return the fitted value at x."""
        return self.coefficient * math.pow(x, self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """
    Fit a power law to positive (x, y); None for fewer than three different x, which have no interval.

    The interval is Student's for a slope of ordinary least squares: errors of log y are independent and normal, with
    equal variances (Draper and Smith, "Applied Regression Analysis", section 1.4).
    """
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    if len(set(xs)) < MIN_POINTS:
        return None
    line = statistics.linear_regression(xs, ys)
    degrees_of_freedom = len(points) - 2
    residuals = [y - line.intercept - line.slope * x for x, y in zip(xs, ys, strict=True)]
    spread = math.sqrt(sum(r * r for r in residuals) / degrees_of_freedom / (statistics.pvariance(xs) * len(xs)))
    half = compute_central_t_quantile(CONFIDENCE, degrees_of_freedom) * spread
    return PowerLaw(math.exp(line.intercept), line.slope, line.slope - half, line.slope + half)


def compute_central_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return t such that a variable of Student's distribution is in [-t, t] with `probability`."""
    low, high = 0.0, 1.0
    while compute_central_t_probability(high, degrees_of_freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if compute_central_t_probability(middle, degrees_of_freedom) < probability else (low, middle)
        )
    return high


def compute_central_t_probability(t: float, degrees_of_freedom: int) -> float:
    """
    Return the probability of [-t, t] for a Student variable.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    is_odd = degrees_of_freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees_of_freedom > 1 else 0.0
    for number in range(3 if is_odd else 2, degrees_of_freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
