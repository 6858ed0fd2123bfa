"""
Counts of classified items, as named sums of a loss, and what they say: pure functions of tensors.

`confusion_matrix`, `label_counts`, `top_k_predictions` and `score_histogram` are for losses, without a wait for the
device; `scores`, `label_scores` and `auroc` are for totals over microbatches and ranks. Counts are float64: float32
ones would stop to grow at 2^24.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Average = Literal["micro", "macro", "weighted", "per_class"]


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


def label_counts(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """
    Return a confusion matrix per label of items with several labels: float64 (labels, 2, 2).

    predictions and targets: booleans or 0 and 1, (..., labels), in which a negative target counts nothing. A matrix has
    the weights of items by target (rows) and prediction (columns). weights: of the shape of targets, or of items
    (...,); without them each label of each item counts 1.
    """
    counted = (targets >= 0).double() if weights is None else weights.double()
    if counted.ndim < targets.ndim:
        counted = counted.unsqueeze(-1)
    counted = counted.expand(targets.shape).reshape(-1, targets.shape[-1])
    row, column = (labels.long().clamp(0, 1).reshape(counted.shape) for labels in (targets, predictions))
    counts = torch.zeros(4, targets.shape[-1], dtype=torch.float64, device=targets.device)
    return counts.scatter_add_(0, 2 * row + column, counted).T.reshape(-1, 2, 2)


def top_k_predictions(class_scores: Tensor, targets: Tensor, k: int) -> Tensor:
    """
    Return the target where its score is among the k highest, and elsewhere the class with the highest score.

    class_scores: (..., classes), such as logits; targets: integers (...,), below 0 where `confusion_matrix` ignores
    the item. Of equal scores the lower class comes first. A confusion matrix of the result has top-k accuracy.
    """
    classes = torch.arange(class_scores.shape[-1], device=class_scores.device)
    target = targets.long().clamp(0, class_scores.shape[-1] - 1).unsqueeze(-1)
    score = class_scores.gather(-1, target)
    is_before = (class_scores > score) | ((class_scores == score) & (classes < target))
    return torch.where(is_before.sum(-1) < k, target.squeeze(-1), class_scores.argmax(-1))


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


def scores(confusion: Tensor, averages: Sequence[Average], beta: float = 1.0) -> Mapping[str, float | None]:
    """
    Return `accuracy`, and precision, recall and F-beta of classes: averages as `f1/macro`, single classes as `f1/3`.

    confusion: float64 (classes, classes) as `confusion_matrix` gives it. A class that is the target of no item has no
    scores (None) and no part in averages; one that is never predicted has a precision of 0. "weighted" counts classes
    by their items. Micro averages of all three are the accuracy, as each item has one target and one prediction.
    """
    hits, support = confusion.diagonal(), confusion.sum(1)
    accuracy = _ratio(hits.sum(), support.sum())
    return {"accuracy": accuracy, **_by_class(hits, support, confusion.sum(0), averages, beta)}


def label_scores(counts: Tensor, averages: Sequence[Average], beta: float = 1.0) -> Mapping[str, float | None]:
    """
    Return `label_accuracy`, and precision, recall and F-beta of labels, named and averaged as in `scores`.

    counts: float64 (labels, 2, 2) as `label_counts` gives it. The accuracy is the share of right decisions over all
    labels of all items. A label that no item has is treated as a class without items. "micro" adds up the counts of all
    labels before it divides.
    """
    hits, support, predicted = counts[:, 1, 1], counts[:, 1].sum(-1), counts[..., 1].sum(-1)
    accuracy = _ratio(hits.sum() + counts[:, 0, 0].sum(), counts.sum())
    return {"label_accuracy": accuracy, **_by_class(hits, support, predicted, averages, beta)}


def _by_class(
    hits: Tensor, support: Tensor, predicted: Tensor, averages: Sequence[Average], beta: float
) -> Mapping[str, float | None]:
    """Return averages of scores by name; all three counts are float64 (classes,)."""
    is_target = support > 0
    weights = {"macro": is_target.double(), "weighted": support}
    by_class, total = _scored(hits, support, predicted, beta), _scored(hits.sum(), support.sum(), predicted.sum(), beta)
    found: dict[str, float | None] = {}
    for name, values in by_class.items():
        for average in averages:
            if average == "per_class":
                pairs = zip(values.tolist(), is_target.tolist(), strict=True)
                found |= {f"{name}/{number}": value if has else None for number, (value, has) in enumerate(pairs)}
            elif average == "micro":
                found[f"{name}/micro"] = float(total[name]) if support.sum() > 0 else None
            else:
                # Chosen and not multiplied: a class without items may be NaN, and so is NaN times 0.
                weighted = (values * weights[average])[is_target].sum()
                found[f"{name}/{average}"] = _ratio(weighted, weights[average].sum())
    return found


def _scored(hits: Tensor, support: Tensor, predicted: Tensor, beta: float) -> dict[str, Tensor]:
    """Return precision, recall and F-beta by name, NaN where there is no item."""
    square = beta**2
    return {
        "precision": hits / predicted.clamp(min=torch.finfo(torch.float64).tiny),
        "recall": hits / support,
        f"f{beta:g}": (1 + square) * hits / (square * support + predicted),
    }


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return float(part / whole) if whole > 0 else None
