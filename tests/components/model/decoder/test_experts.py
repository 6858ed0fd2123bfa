"""The gradients of the load-balancing loss."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.distributed.row_sums import RowSums
from drawloom.components.model.decoder.experts import aux_loss_grad, inject_grad
from support.seeding import seeds


def injected(probabilities: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Probabilities (rows, length, experts), as a block with all tokens has them in its graph."""
    counts = RowSums().row_counts(chosen, torch.empty(chosen.shape[:2]), probabilities.shape[2])
    return inject_grad(probabilities, aux_loss_grad(counts, weights, chosen.shape[1]).unsqueeze(1))


@given(seeds, st.integers(0, 3), st.integers(0, 7), st.integers(1, 6), st.data())
def test_gradient_is_that_of_the_loss(_seed: object, rows: int, length: int, experts: int, data: st.DataObject) -> None:
    """Probabilities pass unchanged; the gradient of the formula is added to the incoming one."""
    choices = data.draw(st.integers(1, experts))
    probabilities = torch.randn(rows, length, experts, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = probabilities.topk(choices).indices
    weights = torch.rand(rows, dtype=torch.float64)  # in float32 the reference would round its own products
    incoming = torch.randn_like(probabilities)
    found = injected(probabilities, chosen, weights)
    assert torch.equal(found, probabilities)
    loss = (probabilities * incoming).sum()
    for row in range(rows if length else 0):
        share = chosen[row].flatten().bincount(minlength=experts) / length
        loss = loss + weights[row] * experts * (share * probabilities[row].mean(0)).sum()
    expected = torch.autograd.grad(loss, probabilities)
    torch.testing.assert_close(torch.autograd.grad(found, probabilities, incoming), expected)


def test_balances_experts() -> None:
    """Trained on this loss alone, a router that sends most tokens to two of five experts uses all alike."""
    torch.manual_seed(0)
    bias = torch.tensor([3.0, 2.0, 0.0, 0.0, -1.0], requires_grad=True)
    noise, counts = torch.randn(4, 64, 5), []
    optimizer = torch.optim.Adam([bias], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        probabilities = (noise + bias).softmax(-1)
        chosen = probabilities.detach().topk(2).indices
        (injected(probabilities, chosen, torch.ones(4)) * 0).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        counts.append(chosen.flatten().bincount(minlength=5))
    assert counts[0].min() < 10 and counts[0].max() > 200
    assert counts[-1].min() > 85 and counts[-1].max() < 120  # all alike would be 102
