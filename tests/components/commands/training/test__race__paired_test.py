"""The sequential test of paired differences."""

import math

import numpy as np
import pytest

from drawloom.components.commands.training._race import (
    PRECISION,
    SIGN_PRIOR,
    compute_mean_interval,
    compute_sign_evidence,
    judge_differences,
)

ERROR = 0.05


def decide(differences: np.ndarray) -> tuple[str, int]:
    """Return the first decision, looking after every pair, and its pairs."""
    for count in range(1, len(differences) + 1):
        judged = judge_differences(differences[:count].tolist(), ERROR)
        if judged.decision != "undecided":
            return judged.decision, count
    return "undecided", len(differences)


@pytest.mark.parametrize("failing", [0.0, 0.2], ids=["no failures", "failures"])
def test_repeated_looks_keep_the_error_rate(failing: float) -> None:
    """Of 1,000 comparisons between equal recipes at most 5% are decided, with 40 looks and with runs that fail."""
    random = np.random.default_rng(0)
    values = random.normal(size=(1000, 40, 2)) * 0.01
    values[random.random(values.shape) < failing] = math.inf
    with np.errstate(invalid="ignore"):
        differences = values[..., 1] - values[..., 0]
    called = sum(decide(row)[0] != "undecided" for row in differences)
    assert called <= 50, called


def test_real_effects_are_found_in_few_pairs() -> None:
    """Effects of 1.5 standard deviations are found within 20 pairs, nearly always, in about 9, and never reversed."""
    differences = np.random.default_rng(0).normal(loc=1.5, size=(300, 20))
    found = [decide(row) for row in differences]
    assert sum(decision == "better" for decision, _ in found) >= 285
    assert not any(decision == "worse" for decision, _ in found)
    assert np.mean([count for _, count in found]) < 10


def test_interval_ends_where_the_mixed_likelihood_ratio_is_one_over_the_error() -> None:
    """At both ends, normal likelihoods integrated over scales and effect sizes have the ratio 1 / error."""
    values = np.random.default_rng(1).normal(loc=0.3, size=7)
    interval = compute_mean_interval(values.tolist(), ERROR)
    assert interval is not None
    logarithms, effects = np.linspace(-5, 8, 2000), np.linspace(-16, 16, 2001)
    scales, prior = np.exp(logarithms), np.exp(-PRECISION * effects**2 / 2)
    for end in interval:
        scaled = (values - end)[:, None] / scales
        squares = ((scaled[:, :, None] - effects) ** 2).sum(0)
        mixed = (np.exp(-squares / 2) @ (prior / prior.sum()) * scales**-7.0).sum()
        assert mixed / (np.exp(-(scaled**2).sum(0) / 2) * scales**-7.0).sum() == pytest.approx(1 / ERROR, rel=1e-4)


def test_failed_runs_decide_by_signs() -> None:
    """
    Eight failures in eight pairs decide, seven do not; pairs in which both runs fail count for neither side; the
    evidence is the integral over the chances.
    """
    assert decide(np.full(8, -math.inf)) == ("worse", 8)
    assert decide(np.array([math.nan] * 5 + [math.inf] * 7))[0] == "undecided"
    judged = judge_differences([0.1, 0.2, -math.inf], ERROR)
    assert judged.mean is None and judged.interval is None and (judged.wins, judged.losses) == (2, 1)
    chances = (np.arange(200_000) + 0.5) / 200_000
    density = (chances * (1 - chances)) ** (SIGN_PRIOR - 1)
    total = math.gamma(SIGN_PRIOR) ** 2 / math.gamma(2 * SIGN_PRIOR)
    moment = (density * chances**3 * (1 - chances) ** 2).mean() / total
    assert compute_sign_evidence(3, 2) == pytest.approx(moment * 2**5, rel=1e-4)
