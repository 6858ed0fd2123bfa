"""Each token predicted from those before it."""

import torch

from drawloom.components.loss.next_token import NextToken
from drawloom.components.ports.data import IGNORE_INDEX, Batch


def test_only_tokens_with_a_target_weigh() -> None:
    """The loss is the sum over tokens, the weight the number of those that have a target."""
    row = torch.arange(4).unsqueeze(0)
    batch = Batch(row, torch.tensor([[1, IGNORE_INDEX, 3, IGNORE_INDEX]]), row, torch.zeros_like(row))
    loss, weight = NextToken().loss(torch.tensor([[0.5, 0.0, 1.5, 0.0]]), batch)
    assert (float(loss), float(weight)) == (2.0, 2.0)
    tokens, shared = NextToken().inputs(batch)
    assert tokens is batch.tokens and shared.targets is batch.targets
