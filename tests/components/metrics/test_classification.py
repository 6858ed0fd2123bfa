"""Scores of a classification loss."""

import pytest

from drawloom.components.metrics.auroc import Auroc
from drawloom.components.metrics.classification import Classification
from drawloom.components.metrics.multilabel import Multilabel
from drawloom.graph import UserError
from support.metrics import measure, step_of, step_without_loss

FIRST = [[2.0, 1.0], [0.0, 3.0]]
SECOND = [[1.0, 0.0], [2.0, 4.0]]


def test_scores_cover_all_microbatches_and_replicas() -> None:
    """Counts are added before the division; classes and averages have names of their own."""
    whole = step_of([0.0, 0.0], [1.0, 1.0], {"confusion": [FIRST, SECOND]})
    parts = [step_of([0.0], [1.0], {"confusion": [counts]}) for counts in (FIRST, SECOND)]
    metric = Classification(classes=2, averages=("macro", "per_class"))
    for steps in ([whole], [parts[0], step_without_loss(), parts[1]]):
        scores = measure(metric, *steps)
        assert scores["accuracy"] == pytest.approx(10 / 13) and scores["recall/1"] == pytest.approx(7 / 9)
        assert scores["recall/macro"] == pytest.approx((3 / 4 + 7 / 9) / 2) and len(scores) == 1 + 3 * 3


def test_scores_of_labels_cover_all_microbatches_and_replicas() -> None:
    """Counts of two labels are added before anything is divided, on ranks with and without the last stage."""
    parts = [[FIRST, SECOND], [SECOND, FIRST]]
    steps = [step_of([0.0], [1.0], {"labels": [part]}) for part in parts]
    scores = measure(
        Multilabel(labels=2, averages=("micro", "per_class"), beta=2.0), steps[0], step_without_loss(), steps[1]
    )
    assert scores["label_accuracy"] == pytest.approx(10 / 13) and scores["recall/micro"] == pytest.approx(7 / 9)
    assert scores["recall/0"] == scores["recall/1"] == pytest.approx(7 / 9)
    assert scores["f2/micro"] == pytest.approx(5 * 7 / (4 * 9 + 8)) and len(scores) == 1 + 3 * 3


def test_auroc_covers_all_microbatches_and_replicas() -> None:
    """It is the area under the added histograms."""
    steps = [step_of([0.0], [1.0], {"score_histogram": [histogram]}) for histogram in (FIRST, SECOND)]
    # labels in rows: 3 and 1 items of label 0, 2 and 7 of label 1
    assert measure(Auroc(bins=2), *steps) == {"auroc": pytest.approx((2 * 1.5 + 7 * (3 + 0.5)) / (4 * 9))}


def test_counts_of_another_shape_are_refused() -> None:
    """With both shapes, and the setting to change."""
    step = step_of([0.0], [1.0], {"confusion": [FIRST], "score_histogram": [FIRST]})
    with pytest.raises(UserError, match=r"shape \(2, 2\), and the metric needs shape \(3, 3\); .* `classes`"):
        Classification(classes=3).measure_on_rank(step)
    with pytest.raises(UserError, match=r"needs shape \(2, 9\); .* `bins`"):
        Auroc(bins=9).measure_on_rank(step)
    with pytest.raises(UserError, match=r"no sum called 'labels'"):
        Multilabel(labels=2).measure_on_rank(step)
