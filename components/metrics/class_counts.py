"""
Counts over classified items, as named sums of a loss, and scores computed from them: pure functions on tensors.

Losses call `confusion_matrix`, `count_confusion_by_label`, `predict_target_if_in_top_k` and `score_histogram`, which do
not wait for the device. `compute_class_scores`, `compute_label_scores` and `compute_auroc` take totals over
microbatches and ranks. Counts are float64, because float32 counts would stop growing at 2^24.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Average = Literal["micro", "macro", "weighted", "per_class"]


def confusion_matrix(predictions: Tensor, targets: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """
    Sum item weights by target (rows) and prediction (columns): float64 (classes, classes).

    predictions and targets: integers or booleans with one shape, from 0 to below `classes`, or anything where
    `weights`, with the same shape, is 0. Without weights an item counts 1, or 0 with a negative target such as
    IGNORE_INDEX.
    """
    counted = targets >= 0 if weights is None else weights
    row, column = (labels.long().clamp(0, classes - 1).flatten() for labels in (targets, predictions))
    counts = torch.zeros(classes * classes, dtype=torch.float64, device=targets.device)
    return counts.index_add_(0, row * classes + column, counted.double().flatten()).view(classes, classes)


def count_confusion_by_label(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """
    Return one confusion matrix per label, for items with several labels: float64 (labels, 2, 2).

    predictions and targets: booleans, or 0 and 1, (..., labels); negative targets do not count. A matrix sums
    item weights by target (rows) and prediction (columns). weights: (..., labels) or (...,); default: 1.
    """
    counted = (targets >= 0).double() if weights is None else weights.double()
    if counted.ndim < targets.ndim:
        counted = counted.unsqueeze(-1)
    counted = counted.expand(targets.shape).reshape(-1, targets.shape[-1])
    row, column = (labels.long().clamp(0, 1).reshape(counted.shape) for labels in (targets, predictions))
    counts = torch.zeros(4, targets.shape[-1], dtype=torch.float64, device=targets.device)
    return counts.scatter_add_(0, 2 * row + column, counted).T.reshape(-1, 2, 2)


def predict_target_if_in_top_k(class_scores: Tensor, targets: Tensor, k: int) -> Tensor:
    """
    Return the target where its score is among the k highest, and elsewhere the class with the highest score.

    class_scores: (..., classes), such as logits; targets: integers (...,), negative for items to ignore. Among equal
    scores the lower class comes first. The accuracy from the result's confusion matrix is the top-k accuracy.
    """
    classes = torch.arange(class_scores.shape[-1], device=class_scores.device)
    target = targets.long().clamp(0, class_scores.shape[-1] - 1).unsqueeze(-1)
    score = class_scores.gather(-1, target)
    is_before = (class_scores > score) | ((class_scores == score) & (classes < target))
    return torch.where(is_before.sum(-1) < k, target.squeeze(-1), class_scores.argmax(-1))


def score_histogram(scores: Tensor, labels: Tensor, bins: int, weights: Tensor | None = None) -> Tensor:
    """
    Sum item weights by label, 0 or 1, and by score, in equal bins from 0 to 1: float64 (2, bins).

    scores: floating point, any shape; labels: integers or booleans, and weights, as in `confusion_matrix`.
    """
    counted = labels >= 0 if weights is None else weights
    column = (scores.detach().double() * bins).clamp(0, bins - 1).long().flatten()
    counts = torch.zeros(2 * bins, dtype=torch.float64, device=scores.device)
    row = labels.long().clamp(0, 1).flatten()
    return counts.index_add_(0, row * bins + column, counted.double().flatten()).view(2, bins)


def compute_auroc(histogram: Tensor) -> float | None:
    """
    Return the area under the ROC curve from a `score_histogram`, float64 (2, bins), or None without items of a label.

    The area is the probability that an item with label 1 has a higher score than an item with label 0. Scores in the
    same bin are equal and count one half, as in the trapezoidal rule.
    """
    negatives, positives = histogram
    pairs = positives.sum() * negatives.sum()
    below = negatives.cumsum(0) - negatives / 2
    return float((positives * below).sum() / pairs) if pairs > 0 else None


def compute_class_scores(
    confusion: Tensor, averages: Sequence[Average], beta: float = 1.0
) -> Mapping[str, float | None]:
    """
    Return `accuracy`, and precision, recall and F-beta for classes: averages as `f1/macro`, single classes as `f1/3`.

    confusion: float64 (classes, classes) from `confusion_matrix`. Averages ignore classes without items, whose scores
    are None. A class that is never predicted has a precision of 0. "weighted" weights classes by their items. Micro
    averages equal the accuracy, because an item has one target and one prediction.
    """
    hits, support = confusion.diagonal(), confusion.sum(1)
    accuracy = _divide_or_none(hits.sum(), support.sum())
    return {"accuracy": accuracy, **_average_precision_recall_f_beta(hits, support, confusion.sum(0), averages, beta)}


def compute_label_scores(
    label_confusion: Tensor, averages: Sequence[Average], beta: float = 1.0
) -> Mapping[str, float | None]:
    """
    Return `label_accuracy`, and precision, recall and F-beta for labels, averaged as in `compute_class_scores`.

    label_confusion: float64 (labels, 2, 2) from `count_confusion_by_label`. The accuracy is the fraction of right
    decisions over all items and labels. A label without items is treated like a class without items. "micro" sums the
    counts of all labels before it divides.
    """
    hits, support, predicted = label_confusion[:, 1, 1], label_confusion[:, 1].sum(-1), label_confusion[..., 1].sum(-1)
    accuracy = _divide_or_none(hits.sum() + label_confusion[:, 0, 0].sum(), label_confusion.sum())
    return {"label_accuracy": accuracy, **_average_precision_recall_f_beta(hits, support, predicted, averages, beta)}


def _average_precision_recall_f_beta(
    hits: Tensor, support: Tensor, predicted: Tensor, averages: Sequence[Average], beta: float
) -> Mapping[str, float | None]:
    """Return scores by name and average, from counts by class: hits, true items, predictions; float64 (classes,)."""
    is_target = support > 0
    weights = {"macro": is_target.double(), "weighted": support}
    by_class, total = (
        _precision_recall_f_beta_by_class(hits, support, predicted, beta),
        _precision_recall_f_beta_by_class(hits.sum(), support.sum(), predicted.sum(), beta),
    )
    averaged: dict[str, float | None] = {}
    for name, values in by_class.items():
        for average in averages:
            if average == "per_class":
                pairs = zip(values.tolist(), is_target.tolist(), strict=True)
                averaged |= {f"{name}/{number}": value if has else None for number, (value, has) in enumerate(pairs)}
            elif average == "micro":
                averaged[f"{name}/micro"] = float(total[name]) if support.sum() > 0 else None
            else:
                # Indexing, because a class without items may be NaN, and NaN times 0 is NaN.
                weighted = (values * weights[average])[is_target].sum()
                averaged[f"{name}/{average}"] = _divide_or_none(weighted, weights[average].sum())
    return averaged


def _precision_recall_f_beta_by_class(
    hits: Tensor, support: Tensor, predicted: Tensor, beta: float
) -> dict[str, Tensor]:
    """Return precision, recall and F-beta from counts; NaN for classes without items."""
    square = beta**2
    return {
        "precision": hits / predicted.clamp(min=torch.finfo(torch.float64).tiny),
        "recall": hits / support,
        f"f{beta:g}": (1 + square) * hits / (square * support + predicted),
    }


def _divide_or_none(dividend: Tensor, divisor: Tensor) -> float | None:
    """Return dividend / divisor as a float, or None if the divisor is 0."""
    return float(dividend / divisor) if divisor > 0 else None
