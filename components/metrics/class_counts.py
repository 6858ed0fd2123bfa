"""
Counts of classified items, as named sums of a loss, and what they say: pure functions of tensors.

`confusion_matrix` and `score_histogram` are for losses, without a wait for the device; `scores` and `auroc` are for
totals over microbatches and ranks. Counts are float64: float32 ones would stop to grow at 2^24.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Average = Literal["macro", "weighted", "per_class"]


def confusion_matrix(predictions: Tensor, targets: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """
    The weights of items by target (rows) and prediction (columns): float64 (classes, classes).

    predictions and targets: integers or booleans of one shape, from 0 to below `classes`, or anything where `weights`,
    of the same shape, is 0; without weights each item counts 1, and negative targets, such as IGNORE_INDEX, nothing.
    """
    counted = targets >= 0 if weights is None else weights
    row, column = (each.long().clamp(0, classes - 1).flatten() for each in (targets, predictions))
    found = torch.zeros(classes * classes, dtype=torch.float64, device=targets.device)
    return found.index_add_(0, row * classes + column, counted.double().flatten()).view(classes, classes)


def score_histogram(scores: Tensor, labels: Tensor, bins: int, weights: Tensor | None = None) -> Tensor:
    """
    The weights of items by label, 0 or 1, and by score, in equal bins of 0 to 1: float64 (2, bins).

    scores: floating point of any shape; labels: integers or booleans, and weights, as in `confusion_matrix`.
    """
    counted = labels >= 0 if weights is None else weights
    place = (scores.detach().double() * bins).clamp(0, bins - 1).long().flatten()
    found = torch.zeros(2 * bins, dtype=torch.float64, device=scores.device)
    row = labels.long().clamp(0, 1).flatten()
    return found.index_add_(0, row * bins + place, counted.double().flatten()).view(2, bins)


def auroc(histogram: Tensor) -> float | None:
    """
    The area under the ROC curve of a float64 `score_histogram` (2, bins); None unless there are items of both labels.

    It is the probability that an item of label 1 has a higher score than one of label 0, a half where they are equal;
    scores in one bin count as equal. This is the area under the trapezoids between the curve's points.
    """
    negatives, positives = histogram
    pairs = positives.sum() * negatives.sum()
    below = negatives.cumsum(0) - negatives / 2
    return float((positives * below).sum() / pairs) if pairs > 0 else None


def scores(confusion: Tensor, averages: Sequence[Average]) -> Mapping[str, float | None]:
    """
    `accuracy`, and precision, recall and F1 of classes: averages as `f1/macro`, single classes as `f1/3`.

    confusion: float64 (classes, classes) as `confusion_matrix` gives it. A class that is the target of no item has no
    scores (None) and no part in averages; one that is never predicted has a precision of 0. "weighted" counts classes
    by their items. Micro averages of all three are the accuracy, as each item has one target and one prediction.
    """
    support, hits = confusion.sum(1), confusion.diagonal()
    by_class = {
        "precision": hits / confusion.sum(0).clamp(min=torch.finfo(torch.float64).tiny),
        "recall": hits / support,
        "f1": 2 * hits / (support + confusion.sum(0)),
    }
    held = support > 0
    weights = {"macro": held.double(), "weighted": support}
    found: dict[str, float | None] = {"accuracy": _ratio(hits.sum(), support.sum())}
    for name, values in by_class.items():
        for average in averages:
            if average == "per_class":
                each = zip(values.tolist(), held.tolist(), strict=True)
                found |= {f"{name}/{number}": value if has else None for number, (value, has) in enumerate(each)}
            else:
                # Chosen and not multiplied: a class without items may be NaN, and so is NaN times 0.
                total = (values * weights[average])[held].sum()
                found[f"{name}/{average}"] = _ratio(total, weights[average].sum())
    return found


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return float(part / whole) if whole > 0 else None
