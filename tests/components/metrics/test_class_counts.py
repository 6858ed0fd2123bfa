"""Counts of classified items, and scores, against the plain formulas on the items themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.metrics.class_counts import (
    Average,
    compute_auroc,
    compute_class_scores,
    compute_label_scores,
    confusion_matrix,
    count_confusion_by_label,
    predict_target_if_in_top_k,
    score_histogram,
)
from drawloom.components.ports.data import IGNORE_INDEX

TARGETS = [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]
PREDICTED = [0, 0, 1, 2, 1, 0, 3, 3, 0, 2]


def confusion(predicted: list[int] = PREDICTED, targets: list[int] = TARGETS) -> Tensor:
    """Return counts for four classes: class 1 is rare, and no item has target 2."""
    return confusion_matrix(torch.tensor(predicted), torch.tensor(targets), 4)


def plain(number: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of a class, item by item."""
    pairs = [*zip(PREDICTED, TARGETS, strict=True)]
    hits = sum(predicted == target == number for predicted, target in pairs)
    precision = hits / sum(predicted == number for predicted, _ in pairs)
    recall = hits / sum(target == number for _, target in pairs)
    return precision, recall, 2 * precision * recall / (precision + recall)


def test_scores_equal_those_of_the_items() -> None:
    """Scores are by class, as plain and weighted means, and accuracy; a class without items is None and in no mean."""
    actual = compute_class_scores(confusion(), ("macro", "weighted", "per_class"))
    support = {0: 4, 1: 2, 3: 4}
    expected: dict[str, Any] = {"accuracy": 0.5}
    for column, name in enumerate(("precision", "recall", "f1")):
        by_class = {number: plain(number)[column] for number in support}
        expected[f"{name}/macro"] = sum(by_class.values()) / 3
        expected[f"{name}/weighted"] = sum(by_class[number] * items for number, items in support.items()) / 10
        expected |= {f"{name}/{number}": by_class.get(number) for number in range(4)}
    assert actual == pytest.approx(expected)


def test_a_class_that_is_never_predicted_has_zeros() -> None:
    """0 / 0 is a precision of 0 where there are items, and they count in the mean."""
    actual = compute_class_scores(confusion([0, 0], [0, 1]), ("macro", "per_class"))
    assert [actual[f"{name}/1"] for name in ("precision", "recall", "f1")] == [0, 0, 0]
    assert actual["precision/macro"] == 0.25 and actual["recall/macro"] == 0.5


def test_no_items_have_no_scores() -> None:
    """None everywhere, and neither NaN nor zero."""
    assert {*compute_class_scores(confusion([], []), ("macro", "weighted", "per_class")).values()} == {None}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_items_count_by_their_weights_and_ignored_ones_not_at_all(dtype: torch.dtype) -> None:
    """
    Weights and ignored items count in confusion matrices and histograms, in any shape, with integer or boolean labels.
    """
    targets = torch.tensor([[1, IGNORE_INDEX], [0, 1]], dtype=dtype)
    predicted = torch.tensor([[1, 1], [0, 0]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.0], [2.0, 3.0]])
    assert confusion_matrix(predicted, targets, 2, weights).tolist() == [[2.0, 0.0], [3.0, 0.5]]
    assert confusion_matrix(predicted, targets, 2).tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert confusion_matrix(predicted == 1, targets == 1, 2).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    probabilities = torch.tensor([[0.0, 0.5], [1.0, 0.3]], dtype=torch.bfloat16)
    assert score_histogram(probabilities, targets, 2, weights).tolist() == [[0.0, 2.0], [3.5, 0.0]]


def test_counts_grow_past_the_integers_of_float32() -> None:
    """One item more than 3 * 2^24 is one more."""
    many = torch.tensor([[3.0 * 2**24, 0.0], [0.0, 0.0]], dtype=torch.float64)
    more = many + confusion_matrix(torch.tensor([0]), torch.tensor([0]), 2)
    assert more[0, 0] - many[0, 0] == 1


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    """
    It is the share over all pairs with different labels, half for equal scores; exact if a bin's scores are equal.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(20, (300,), generator=generator)
    labels = torch.randint(20, (300,), generator=generator) < values
    high, low = values[labels], values[~labels]
    pairs = (high[:, None] > low).double() + (high[:, None] == low).double() / 2
    histogram = score_histogram((values + 0.5) / 20, labels, 20)
    assert compute_auroc(histogram) == pytest.approx(float(pairs.mean()), abs=1e-12)
    assert compute_auroc(histogram.flip(0)) == pytest.approx(1 - float(pairs.mean()), abs=1e-12)


def test_auroc_of_one_label_is_none() -> None:
    """It is not a half, because there are no pairs to compare."""
    assert compute_auroc(score_histogram(torch.tensor([0.2, 0.7]), torch.tensor([1, 1]), 10)) is None


AVERAGES: tuple[Average, ...] = ("micro", "macro", "weighted", "per_class")


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_f_beta_is_the_weighted_harmonic_mean_of_precision_and_recall(beta: float) -> None:
    """Item by item, (1 + b^2) p r / (b^2 p + r), under the name of its beta; micro averages are the accuracy."""
    actual = compute_class_scores(confusion(), AVERAGES, beta)
    support = {0: 4, 1: 2, 3: 4}
    by_class = {}
    for number in support:
        precision, recall, _ = plain(number)
        by_class[number] = (1 + beta**2) * precision * recall / (beta**2 * precision + recall)
    name = f"f{beta:g}"
    assert [actual[f"{name}/{number}"] for number in support] == pytest.approx([*by_class.values()])
    assert actual[f"{name}/macro"] == pytest.approx(sum(by_class.values()) / 3)
    weighted = sum(by_class[number] * items for number, items in support.items()) / 10
    assert actual[f"{name}/weighted"] == pytest.approx(weighted)
    assert {actual[f"{kind}/micro"] for kind in ("precision", "recall", name)} == {actual["accuracy"]}


def draw_labels() -> tuple[Tensor, Tensor]:
    """
    Draw decisions and targets for 60 items over 5 labels; no item has the last label, and the fourth is never
    predicted.
    """
    generator = torch.Generator().manual_seed(0)
    predicted, targets = (torch.rand(12, 5, 5, generator=generator) < 0.4 for _ in range(2))
    targets[..., 4], predicted[..., 3] = False, False
    return predicted, targets


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_scores_of_several_labels_equal_those_of_the_items(beta: float) -> None:
    """Scores are by label and on average, from pairs of item and label; an absent label is in micro averages only."""
    predicted, targets = draw_labels()
    ours, right = ({tuple(pair) for pair in side.view(-1, 5).nonzero().tolist()} for side in (predicted, targets))

    def score(labels: set[int]) -> tuple[float, float, float]:
        given, true = ({pair for pair in pairs if pair[1] in labels} for pairs in (ours, right))
        precision, recall = len(given & true) / max(len(given), 1), len(given & true) / len(true)
        return precision, recall, (1 + beta**2) * precision * recall / max(beta**2 * precision + recall, 1e-9)

    actual = compute_label_scores(count_confusion_by_label(predicted, targets), AVERAGES, beta)
    support = {label: int(targets[..., label].sum()) for label in range(4)}
    assert actual["label_accuracy"] == pytest.approx(1 - len(ours ^ right) / 300)
    for column, name in enumerate(("precision", "recall", f"f{beta:g}")):
        values = [score({label})[column] for label in support]
        assert [actual[f"{name}/{label}"] for label in support] == pytest.approx(values)
        assert actual[f"{name}/4"] is None and actual[f"{name}/micro"] == pytest.approx(score({*range(5)})[column])
        assert actual[f"{name}/macro"] == pytest.approx(sum(values) / 4)
        by_items = sum(value * items for value, items in zip(values, support.values(), strict=True))
        assert actual[f"{name}/weighted"] == pytest.approx(by_items / sum(support.values()))


def test_labels_count_by_their_weights_and_ignored_ones_not_at_all() -> None:
    """Weights are by item or by label; a negative target counts nothing; without items there are no scores."""
    targets = torch.tensor([[1, IGNORE_INDEX], [0, 1]])
    predicted = torch.tensor([[True, True], [True, False]])
    assert count_confusion_by_label(predicted, targets).tolist() == [[[0, 1], [0, 1]], [[0, 0], [1, 0]]]
    by_item = count_confusion_by_label(predicted, targets.clamp(min=0), torch.tensor([2.0, 0.5]))
    assert by_item.tolist() == [[[0, 0.5], [0, 2]], [[0, 2], [0.5, 0]]]
    by_label = count_confusion_by_label(predicted, targets.clamp(min=0), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert by_label.tolist() == [[[0, 3], [0, 1]], [[0, 2], [4, 0]]]
    assert {*compute_label_scores(torch.zeros(3, 2, 2, dtype=torch.float64), AVERAGES).values()} == {None}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_targets_in_the_top_k_make_the_accuracy_top_k_accuracy(k: int) -> None:
    """The share of items whose target is in torch.topk; misses are told as the likeliest class."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 6, generator=generator), torch.randint(6, (50,), generator=generator)
    is_hit = (logits.topk(k).indices == targets[:, None]).any(-1)
    predicted = predict_target_if_in_top_k(logits, targets, k)
    assert torch.equal(predicted, torch.where(is_hit, targets, logits.argmax(-1)))
    actual = compute_class_scores(confusion_matrix(predicted, targets, 6), ("macro",))
    assert actual["accuracy"] == pytest.approx(float(is_hit.double().mean()))
    assert predict_target_if_in_top_k(torch.zeros(1, 3), torch.tensor([1]), 2).tolist() == [1]
    assert predict_target_if_in_top_k(torch.zeros(1, 3), torch.tensor([2]), 2).tolist() == [0]
