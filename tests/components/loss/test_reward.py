"""The reward model's loss against its formula, and against TRL."""

import math
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.reward import RewardModel, mark_last_tokens
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import LanguageModel
from drawloom.graph.testing import fake
from support.losses import sample

MARGINS = torch.tensor([0.5, -0.2, 1.0])


def make_loss(**values: Any) -> RewardModel:
    """A loss with drawn head weights of 8 channels."""
    loss = RewardModel(model=fake(LanguageModel, hugging_face_config={"hidden_size": 8}), mesh=fake(Mesh), **values)
    assert loss.module is not None
    loss.module.to_empty(device="cpu")
    torch.manual_seed(1)
    loss.module.reset_parameters()  # type: ignore[operator]
    return loss


def make_pairs(margins: bool = True) -> tuple[Tensor, TokenBatch, Tensor]:
    """Hidden states, rows of a pair each with padding, and both documents' last positions, (rows, 2)."""
    case = sample()
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0, 0, 0, 1, 2]])
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [0.5, 0.5, 0, 0, 0], [0, 0.5, 0, 0.5, 0]])
    labels = torch.zeros(3, 5)
    labels[:, 0] = MARGINS
    batch = case.batch.evolve(document_ids=documents, weights=weights, labels=labels if margins else None)
    return case.hidden, batch, torch.tensor([[1, 4], [0, 2], [2, 3]])


@pytest.mark.parametrize("margins", [True, False])
@pytest.mark.parametrize("centring", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_bradley_and_terry(margins: bool, centring: float) -> None:
    """The mean over pairs, from the hidden states at each document's last token; padding has no score."""
    hidden, batch, ends = make_pairs(margins)
    loss = make_loss(centring=centring)
    total, weight, sums = loss.loss(hidden, None, batch)  # type: ignore[arg-type]
    assert loss.module is not None
    parameter = loss.module.get_parameter("weight")
    scores = (hidden @ parameter[0].double()).gather(1, ends)
    margin = scores[:, 0] - scores[:, 1]
    expected = -F.logsigmoid(margin - (MARGINS if margins else 0.0)) + centring * scores.sum(1).square()
    torch.testing.assert_close(total / weight, expected.mean(), rtol=1e-6, atol=1e-8)
    inputs = hidden, parameter
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total / weight, expected.mean()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert float(weight) == 3 and float(sums["reward_accuracy"]) == float((margin > 0).sum())
    torch.testing.assert_close(sums["reward_margin"], margin.detach().sum())


def test_equal_scores_cost_the_logarithm_of_2_and_swapped_sides_flip_the_margin() -> None:
    """A head of zeros gives log 2 and ties; without margins, exchanging the documents negates every margin."""
    hidden, batch, _ = make_pairs(margins=False)
    loss = make_loss()
    assert loss.module is not None
    _, _, sums = loss.loss(hidden, None, batch)  # type: ignore[arg-type]
    is_pair = batch.document_ids < 2
    swapped = batch.evolve(document_ids=torch.where(is_pair, 1 - batch.document_ids, batch.document_ids))
    _, _, flipped = loss.loss(hidden, None, swapped)  # type: ignore[arg-type]
    torch.testing.assert_close(flipped["reward_margin"], -sums["reward_margin"])
    with torch.no_grad():
        loss.module.get_parameter("weight").zero_()
    total, weight, ties = loss.loss(hidden, None, batch)  # type: ignore[arg-type]
    assert float((total / weight).detach()) == pytest.approx(math.log(2)) and float(ties["reward_accuracy"]) == 1.5


def test_a_score_is_float32_however_narrow_the_hidden_states_are() -> None:
    """Hidden states and weights in bfloat16 are multiplied in float32."""
    loss = make_loss()
    assert loss.module is not None
    narrow = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = loss.module.get_parameter("weight")
    assert (
        loss.score_tokens(narrow).equal(narrow.float() @ weight.T) and loss.score_tokens(narrow).dtype == torch.float32
    )
    assert abs(float(weight.detach().std()) * 3 - 1) < 0.7


def test_documents_end_before_another_and_with_the_row() -> None:
    """Every document, padding included, has one last token."""
    assert mark_last_tokens(torch.tensor([[0, 0, 1], [0, 1, 1]])).tolist() == [[False, True, True], [True, False, True]]


@attrs.frozen
class Scores:
    """Stand-in for TRL's model: the scores of chosen and rejected rows, (2 * pairs, 1)."""

    logits: Tensor
    training: bool = True

    def __call__(self, **inputs: Any) -> "Scores":
        return self


@pytest.mark.soak  # importing TRL takes 15 s
@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_that_of_trl() -> None:
    """`RewardTrainer.compute_loss` in TRL 1.16, with margins and centred scores, gives our loss."""
    pytest.importorskip("trl")
    hidden, batch, ends = make_pairs()
    loss = make_loss(centring=0.3)
    total, weight, _ = loss.loss(hidden, None, batch)  # type: ignore[arg-type]
    scores = loss.score_tokens(hidden)[..., 0].gather(1, ends)
    trainer: Any = MagicMock()
    trainer.args.center_rewards_coefficient = 0.3
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda value: value
    inputs = {"attention_mask": torch.ones(6, 5), "margin": MARGINS}
    compute = import_module("trl").RewardTrainer.compute_loss
    torch.testing.assert_close(total / weight, compute(trainer, Scores(scores.T.reshape(-1, 1)), inputs))
