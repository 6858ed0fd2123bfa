"""
A test of paired differences that stays valid when it is looked at after every pair.

Differences of two runs with one seed are taken as independent and normal, with unknown mean and variance. Their mean
has a confidence sequence: with the given probability, all of its intervals contain the mean. It inverts Lai's mixture
of t likelihood ratios over effect sizes with a normal distribution (Lai 1976, "On confidence sequences"; Wang and
Ramdas 2025, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", theorem 4.9).

A run without a result is worse than any run with one, so its difference is infinite, and there is no mean. From then on
the signs of all pairs decide, by the mixture of binomial likelihood ratios over a beta distribution (Robbins 1970,
"Statistical methods related to the law of the iterated logarithm"). The two parts divide the error between them.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import attrs

Decision = Literal["better", "worse", "undecided"]

SIGN_SHARE = 0.2
"""Share of the error for the signs."""
PRECISION = 0.3
"""1 / variance of the effect sizes in the mixture. With it 8 to 12 pairs decide on 1 to 1.5 standard deviations."""
SIGN_PRIOR = 0.1
"""Parameter of the beta distribution: small, because nearly all pairs with a failed run have the same sign."""


@attrs.frozen
class Judgement:
    """A decision about differences, and their mean with an interval; without a mean if one is infinite."""

    decision: Decision
    mean: float | None
    interval: tuple[float, float] | None
    wins: int
    losses: int


def judge_differences(differences: Sequence[float], error: float) -> Judgement:
    """
    Judge differences: positive ones are better; NaN is a pair without any result, and counts for neither side.

    A wrong decision after any number of pairs has at most the probability `error`.
    """
    wins, losses = sum(number > 0 for number in differences), sum(number < 0 for number in differences)
    if all(map(math.isfinite, differences)):
        interval = compute_mean_interval(differences, error * (1 - SIGN_SHARE))
        mean = statistics.fmean(differences) if differences else None
        decision: Decision = "undecided"
        if interval is not None and not interval[0] <= 0 <= interval[1]:
            decision = "better" if interval[0] > 0 else "worse"
        return Judgement(decision, mean, interval, wins, losses)
    is_decided = compute_sign_evidence(wins, losses) >= 1 / (error * SIGN_SHARE)
    decision = ("better" if wins > losses else "worse") if is_decided else "undecided"
    return Judgement(decision, None, None, wins, losses)


def compute_mean_interval(values: Sequence[float], error: float) -> tuple[float, float] | None:
    """Return the confidence sequence's interval after these values; None while it is unbounded."""
    count = len(values)
    if count < 2:
        return None
    mean = statistics.fmean(values)
    squares = sum((value - mean) ** 2 for value in values)
    # (squares + count d^2) / (squares + count d^2 shrunk) is at most `ratio` for all d = mean - mu in the interval
    shrunk = PRECISION / (count + PRECISION)
    ratio = math.pow(error * math.sqrt(shrunk), -2 / count)
    if ratio * shrunk >= 1:
        return None
    half = math.sqrt((ratio - 1) * squares / (count * (1 - ratio * shrunk)))
    return mean - half, mean + half


def compute_sign_evidence(wins: int, losses: int) -> float:
    """Return the likelihood ratio of these signs: of unknown chances, mixed, against equal chances."""
    logarithm = (wins + losses) * math.log(2) + _log_beta(SIGN_PRIOR + wins, SIGN_PRIOR + losses)
    return math.exp(logarithm - _log_beta(SIGN_PRIOR, SIGN_PRIOR))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
