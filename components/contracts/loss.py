"""What every objective does."""

import torch

from drawloom.components.ports.data import IGNORE_INDEX, Batch
from drawloom.components.ports.pipeline import Loss
from drawloom.graph.testing import expect


def _batch(ignored: bool = False) -> Batch:
    tokens = torch.arange(12).reshape(2, 6)
    targets = torch.full_like(tokens, IGNORE_INDEX) if ignored else tokens + 1
    return Batch(tokens, targets, torch.arange(6).expand(2, 6).clone(), torch.zeros(2, 6, dtype=torch.int64))


def losses_are_summed(objective: Loss) -> None:
    """The loss is the sum of the losses by token, whose weights are summed beside it; both are single numbers."""
    losses = torch.ones(2, 6, requires_grad=True)
    total, weight = objective.loss(losses, _batch())
    expect(total.ndim == weight.ndim == 0, "a sum is no single number")
    expect(total.requires_grad, "the loss can't be differentiated")
    expect(
        torch.allclose(total.double(), weight.double()), f"losses of 1 make {total.item()} of weight {weight.item()}"
    )


def what_is_ignored_weighs_nothing(objective: Loss) -> None:
    """A batch in which nothing is to be learned has the weight 0."""
    _, weight = objective.loss(torch.zeros(2, 6), _batch(ignored=True))
    expect(float(weight) == 0, f"nothing weighs {float(weight)}")


def the_model_sees_tokens(objective: Loss) -> None:
    """The first stage takes as many rows and tokens as the batch has, and all stages see their places."""
    tokens, shared = objective.inputs(_batch())
    expect(
        tokens.shape == shared.positions.shape == shared.document_ids.shape == (2, 6), "the model sees another shape"
    )
