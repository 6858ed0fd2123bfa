"""Counts of classified items, and scores, against the plain formulas on the items themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.metrics.class_counts import auroc, confusion_matrix, score_histogram, scores
from drawloom.components.ports.data import IGNORE_INDEX

TARGETS = [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]
PREDICTED = [0, 0, 1, 2, 1, 0, 3, 3, 0, 2]


def confusion(predicted: list[int] = PREDICTED, targets: list[int] = TARGETS) -> Tensor:
    """Of four classes, of which 1 is rare, 2 is the target of no item."""
    return confusion_matrix(torch.tensor(predicted), torch.tensor(targets), 4)


def plain(number: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of a class, item by item."""
    pairs = [*zip(PREDICTED, TARGETS, strict=True)]
    hits = sum(predicted == target == number for predicted, target in pairs)
    precision = hits / sum(predicted == number for predicted, _ in pairs)
    recall = hits / sum(target == number for _, target in pairs)
    return precision, recall, 2 * precision * recall / (precision + recall)


def test_scores_are_those_of_the_items() -> None:
    """By class, as plain and weighted means, and accuracy; a class without items is None and in no mean."""
    found = scores(confusion(), ("macro", "weighted", "per_class"))
    support = {0: 4, 1: 2, 3: 4}
    expected: dict[str, Any] = {"accuracy": 0.5}
    for place, name in enumerate(("precision", "recall", "f1")):
        of = {number: plain(number)[place] for number in support}
        expected[f"{name}/macro"] = sum(of.values()) / 3
        expected[f"{name}/weighted"] = sum(of[number] * items for number, items in support.items()) / 10
        expected |= {f"{name}/{number}": of.get(number) for number in range(4)}
    assert found == pytest.approx(expected)


def test_a_class_that_is_never_predicted_has_zeros() -> None:
    """0 / 0 is a precision of 0 where there are items, and they count in the mean."""
    found = scores(confusion([0, 0], [0, 1]), ("macro", "per_class"))
    assert [found[f"{name}/1"] for name in ("precision", "recall", "f1")] == [0, 0, 0]
    assert found["precision/macro"] == 0.25 and found["recall/macro"] == 0.5


def test_no_items_have_no_scores() -> None:
    """None everywhere, and neither NaN nor zero."""
    assert {*scores(confusion([], []), ("macro", "weighted", "per_class")).values()} == {None}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_items_count_by_their_weights_and_ignored_ones_not_at_all(dtype: torch.dtype) -> None:
    """In confusion matrices and histograms, of any shape, with labels that are integers or booleans."""
    targets = torch.tensor([[1, IGNORE_INDEX], [0, 1]], dtype=dtype)
    predicted = torch.tensor([[1, 1], [0, 0]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.0], [2.0, 3.0]])
    assert confusion_matrix(predicted, targets, 2, weights).tolist() == [[2.0, 0.0], [3.0, 0.5]]
    assert confusion_matrix(predicted, targets, 2).tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert confusion_matrix(predicted == 1, targets == 1, 2).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    probabilities = torch.tensor([[0.0, 0.5], [1.0, 0.3]], dtype=torch.bfloat16)
    assert score_histogram(probabilities, targets, 2, weights).tolist() == [[0.0, 2.0], [3.5, 0.0]]


def test_counts_grow_past_what_a_float32_can_count() -> None:
    """One item more than 3 * 2^24 is one more."""
    many = torch.tensor([[3.0 * 2**24, 0.0], [0.0, 0.0]], dtype=torch.float64)
    more = many + confusion_matrix(torch.tensor([0]), torch.tensor([0]), 2)
    assert more[0, 0] - many[0, 0] == 1


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    """Over all pairs of both labels, half where scores are equal; exact if scores of a bin are equal."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(20, (300,), generator=generator)
    labels = torch.randint(20, (300,), generator=generator) < values
    high, low = values[labels], values[~labels]
    pairs = (high[:, None] > low).double() + (high[:, None] == low).double() / 2
    histogram = score_histogram((values + 0.5) / 20, labels, 20)
    assert auroc(histogram) == pytest.approx(float(pairs.mean()), abs=1e-12)
    assert auroc(histogram.flip(0)) == pytest.approx(1 - float(pairs.mean()), abs=1e-12)


def test_auroc_of_one_label_is_none() -> None:
    """Not a half: there is nothing to tell apart."""
    assert auroc(score_histogram(torch.tensor([0.2, 0.7]), torch.tensor([1, 1]), 10)) is None
