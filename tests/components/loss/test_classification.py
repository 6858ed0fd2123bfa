"""Classifiers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.loss.classification import Classifier
from drawloom.components.ports.model import LanguageModel
from drawloom.graph import UserError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import fake
from support.losses import sample


def test_the_loss_is_the_weighted_cross_entropy_at_last_tokens(one_rank: Any) -> None:
    """Documents without weight, such as padding, do not count; the gradient equals the formula's."""
    model: Any = fake(LanguageModel, hugging_face_config={"hidden_size": 8})
    loss = Classifier(model=model, mesh=one_rank, labels=["a", "b", "c"])
    module: Any = loss.module
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    inputs = sample()
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    columns: dict[str, Tensor] = {
        "document_ids": torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 2]]),
        "weights": torch.tensor([[1.0, 0, 0, 2, 0], [0, 1, 0, 0, 0]]),
        "labels": torch.tensor([[2.0, 0, 1, 0, 0], [0, 0, 0, 2, 0]]),
    }
    batch = inputs.batch.evolve(**columns)
    total, weight, sums = loss.loss(hidden, None, batch)  # type: ignore[arg-type]
    ends = hidden[[0, 0, 1], [1, 4, 2]]
    logits, labels, weights = ends @ module.weight.T, torch.tensor([2, 1, 0]), torch.tensor([1.0, 2, 1])
    expected = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(total, expected)
    assert float(weight) == 4 and float(sums["accuracy"]) == float(((logits.argmax(-1) == labels) * weights).sum())
    for ours, theirs in zip(
        torch.autograd.grad(total, [hidden, module.weight], retain_graph=True),
        torch.autograd.grad(expected, [hidden, module.weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(UserError, match="needs a label for every document"):
        loss.loss(hidden, None, batch.evolve(labels=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "faults"), [("negative, positive", 0), ("positive, negative", 1), ("negative, neutral, positive", 1)]
)
def test_labels_of_the_data_are_the_losss(labels: str, faults: int) -> None:
    """The data's labels are numbered like the head's outputs, whose names an export has."""
    values: dict[str, Any] = {"vars": {"base": "base"}, "tokens": {"labels": labels.split(", "), "paths": ["a.jsonl"]}}
    problems = [str(problem) for problem in Recipe.load("classify").with_values(values).graph.problems]
    assert ["labels differ from [tokens]'s" in problem for problem in problems] == [True] * faults
    values["count"] = {"use": "metrics.multilabel", "labels": 3}  # a number, not names
    assert "[count]'s" not in str(Recipe.load("classify").with_values(values).graph.problems)
