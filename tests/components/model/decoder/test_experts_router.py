"""Routers: the choice of experts, the gradients from their losses, and the counts for observers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.experts import (
    Router,
    attach_loss_gradient,
    compute_aux_loss_grad,
    sum_weighted_z_loss,
)
from drawloom.components.parallel.row_sums import RowSums
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.recompute.saved_tensors import get_wrapper_of_saved_variable
from support.qwen3 import cpu_kernels
from support.seeding import seeds


def count_choices_by_row(chosen: Tensor, experts: int) -> Tensor:
    """Return the RowCounts of rows whose tokens are all on this rank: chosen (rows, length, choices)."""
    return RowSums().count_row_choices_over_ranks(chosen, torch.empty(chosen.shape[:2]), experts)


@given(seeds, st.integers(0, 3), st.integers(0, 7), st.integers(1, 6), st.data())
def test_balance_adds_the_gradient_of_the_formula(
    _seed: object, rows: int, length: int, experts: int, data: st.DataObject
) -> None:
    """Probabilities pass unchanged; the formula's gradient is added to the incoming one."""
    choices = data.draw(st.integers(1, experts))
    probabilities = torch.randn(rows, length, experts, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = probabilities.topk(choices).indices
    weights = torch.rand(rows, dtype=torch.float64)  # in float32 the reference would round its own products
    incoming = torch.randn_like(probabilities)
    grad = compute_aux_loss_grad(count_choices_by_row(chosen, experts), weights, choices)
    actual = attach_loss_gradient(probabilities, (grad.unsqueeze(1) * probabilities).sum())
    assert torch.equal(actual, probabilities)
    loss = (probabilities * incoming).sum()
    for row in range(rows if length else 0):
        share = chosen[row].flatten().bincount(minlength=experts) / length
        loss = loss + weights[row] * experts * (share * probabilities[row].mean(0)).sum()
    expected = torch.autograd.grad(loss, probabilities)
    torch.testing.assert_close(torch.autograd.grad(actual, probabilities, incoming), expected)


@given(seeds, st.integers(0, 3), st.integers(0, 7), st.integers(1, 6))
def test_z_loss_adds_the_gradient_of_the_formula(_seed: object, rows: int, length: int, experts: int) -> None:
    """The gradient equals 2 log(sum exp) softmax by token, times the token's weight, computed by hand."""
    logits = (3 * torch.randn(rows, length, experts, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(rows, length)
    incoming = torch.randn_like(logits)
    actual = attach_loss_gradient(logits, sum_weighted_z_loss(logits, weights))
    assert torch.equal(actual, logits)
    exponentials = logits.detach().exp()
    total = exponentials.sum(-1, keepdim=True)
    expected = incoming + weights.unsqueeze(-1) * 2 * total.log() * exponentials / total
    torch.testing.assert_close(torch.autograd.grad(actual, logits, incoming)[0], expected)


def test_balance_loss_evens_out_experts() -> None:
    """A router that sends most tokens to two of five experts uses all alike after training on this loss alone."""
    torch.manual_seed(0)
    bias = torch.tensor([3.0, 2.0, 0.0, 0.0, -1.0], requires_grad=True)
    noise, counts = torch.randn(4, 64, 5), []
    optimizer = torch.optim.Adam([bias], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        probabilities = (noise + bias).softmax(-1)
        chosen = probabilities.detach().topk(2).indices
        grad = compute_aux_loss_grad(count_choices_by_row(chosen, 5), torch.ones(4), 2).unsqueeze(1)
        bias.grad = torch.autograd.grad(probabilities, bias, grad.expand(4, 64, 5))[0]
        optimizer.step()
        counts.append(chosen.flatten().bincount(minlength=5))
    assert counts[0].min() < 10 and counts[0].max() > 200
    assert counts[-1].min() > 85 and counts[-1].max() < 120  # all alike would be 102


def router(choices: int = 2, **options: Any) -> Router:
    """Return a router of 6 experts for 5 channels, in float64, with random weights and bias."""
    torch.manual_seed(0)
    spec = ExpertSpec(num_experts=6, num_experts_per_tok=choices, width=1, **options)
    made = Router(5, spec, cpu_kernels()).double()
    if made.e_score_correction_bias is not None:
        made.e_score_correction_bias.normal_()
    return made


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"norm_topk_prob": False},
    "softmax over the chosen": {},
    "sigmoid": {"scoring_func": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "sigmoid, normalised, with a bias": {"scoring_func": "sigmoid", "balancing_bias": True},
    "softmax with a bias": {"balancing_bias": True},
    "groups": {"scoring_func": "sigmoid", "balancing_bias": True, "n_group": 3, "topk_group": 1},
}


def by_hand(made: Router, token: Tensor) -> tuple[list[int], Tensor]:
    """Return a token's experts and their weights, computed expert by expert, without tensor operations."""
    logits, routing = [weight @ token for weight in made.weight], made.spec
    exponentials = [logit.exp() for logit in logits]
    if routing.scoring_func == "softmax":
        scores = [value / sum(exponentials) for value in exponentials]
    else:
        scores = [value / (1 + value) for value in exponentials]
    bias = [0.0] * 6 if made.e_score_correction_bias is None else made.e_score_correction_bias.tolist()
    ranked = {expert: scores[expert].item() + bias[expert] for expert in range(6)}
    if routing.n_group > 1:
        pairs = [(0, 1), (2, 3), (4, 5)]
        best = max(pairs, key=lambda pair: sum(ranked[expert] for expert in pair))
        ranked = {expert: ranked[expert] for expert in best}
    chosen = sorted(ranked, key=lambda expert: -ranked[expert])[: made.spec.num_experts_per_tok]
    weights = torch.stack([scores[expert] for expert in chosen])
    return chosen, routing.routed_scaling_factor * (weights / weights.sum() if routing.norm_topk_prob else weights)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_choice_and_weights_equal_a_computation_by_hand(kind: str) -> None:
    """The bias changes the choice but no weight; weights and their gradients follow the formulas."""
    made = router(**ROUTINGS[kind])
    hidden = torch.randn(1, 40, 5, dtype=torch.float64)
    chosen, weights = made(hidden)
    expected = [by_hand(made, token) for token in hidden[0]]
    assert chosen[0].tolist() == [experts for experts, _ in expected]
    wanted = torch.stack([weight for _, weight in expected])
    torch.testing.assert_close(weights[0], wanted)
    upstream = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(output, made.weight, upstream)[0] for output in (weights[0], wanted))
    torch.testing.assert_close(ours, theirs)


def test_softmax_over_chosen_experts_equals_normalized_softmax() -> None:
    """Top-k before the softmax (Mixtral's paper) gives the weights of a normalized top-k after it."""
    made = router()
    hidden = torch.randn(2, 20, 5, dtype=torch.float64)
    chosen, weights = made(hidden)
    best = (hidden @ made.weight.T).topk(2)
    assert torch.equal(best.indices, chosen)
    torch.testing.assert_close(best.values.softmax(-1), weights)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_change_only_gradients(kind: str) -> None:
    """Weights are the same with losses; gradients differ by both losses' gradients, for normalized scores."""
    made = router(**ROUTINGS[kind])
    hidden, tokens = torch.randn(3, 7, 5, dtype=torch.float64), torch.rand(3, 7)
    plain = made(hidden, tokens)[1]
    without = torch.autograd.grad(plain.sum(), made.weight)[0]
    made.aux_loss_coef, made.z_loss_coef = 0.3, 0.2
    chosen, weights = made(hidden, tokens)
    assert torch.equal(weights, plain)
    logits = hidden @ made.weight.T
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    shares = torch.nn.functional.one_hot(chosen, 6).sum((1, 2)) / 7
    balance = 6 * (tokens.sum(1) * (shares * scores.mean(1)).sum(1)).sum()
    squares = (tokens * logits.exp().sum(-1).log() ** 2).sum()
    extra = torch.autograd.grad(0.3 * balance + 0.2 * squares, made.weight)[0]
    # Weights of tokens are float32.
    torch.testing.assert_close(torch.autograd.grad(weights.sum(), made.weight)[0], without + extra, rtol=1e-6, atol=0)
    assert torch.equal(torch.autograd.grad(made(hidden)[1].sum(), made.weight)[0], without)  # inference has no losses


def test_observers_see_each_microbatch_once() -> None:
    """Observers see microbatches of training alone: no evaluations, and no recomputed activations."""
    made, hidden = router(), torch.randn(2, 9, 5, dtype=torch.float64)
    seen: list[Any] = []

    def observer(tokens: Tensor, scores: Tensor) -> None:
        seen.append((tokens, scores))

    made.add_routing_observer(observer)
    weights = torch.ones(2, 9)
    made(hidden)
    with torch.inference_mode():
        made(hidden, weights)
    assert not seen
    chosen, best = checkpoint(made, hidden, weights, use_reentrant=False)
    best.sum().backward()
    assert len(seen) == 1
    tokens, scores = seen[0]
    assert torch.equal(tokens, chosen.flatten().bincount(minlength=6)) and int(tokens.sum()) == 2 * 9 * 2
    torch.testing.assert_close(scores.sum(-1), torch.ones(18, dtype=torch.float64))
    assert not scores.requires_grad
    _, best = call_with_recomputation(made, hidden, weights)
    saved: Any = get_wrapper_of_saved_variable(best.grad_fn._raw_saved_other)
    saved.get_or_recompute()  # as where the gradients of weights are computed, outside of torch's backward pass
    best.sum().backward()
    assert len(seen) == 2
    made.remove_routing_observer(observer)
    made(hidden, weights)
    assert len(seen) == 2


def test_sigmoids_of_zero_scores_are_finite() -> None:
    """If all scores are 0, weights are 0, not a quotient of zeros."""
    made = Router(1, ExpertSpec(num_experts=4, num_experts_per_tok=2, width=1, scoring_func="sigmoid"), cpu_kernels())
    torch.nn.init.ones_(made.weight)
    _, weights = made(torch.full((1, 1, 1), -1000.0))
    assert weights.tolist() == [[[0.0, 0.0]]]
