"""The gated delta rule with decays by channel, in chunks, against a loop over tokens, document by document."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.channel_delta.eager import channel_delta_rule_eager
from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.gated_delta.eager import delta_rule_eager
from support.recurrences import (
    create_documents,
    delta_rule_by_token,
    draw_decays_by_channel,
    draw_recurrence,
    replace_tokens,
    requiring_grad,
)
from support.seeding import seeds

LAYOUTS = {
    "borders at, before and inside chunks": [[4, 8], [3, 1, 8]],
    "a document over three chunks, and documents of one token": [[2, 9, 1], [1, 1, 1, 1, 1, 7]],
    "a length that no chunk divides": [[5, 2, 3], [10]],
}
"""Lengths of documents in two rows; chunks have 4 tokens."""


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_chunks_equal_a_loop_over_tokens(lengths: list[list[int]], has_state: bool) -> None:
    """For any borders, decays and betas, with and without a state, all results and gradients equal the recurrence."""
    documents = create_documents(lengths)
    inputs = draw_decays_by_channel(draw_recurrence(documents.ids.shape[1])).learned()
    state = torch.randn(2, 4, 6, 5, dtype=torch.float64, requires_grad=True) if has_state else None
    if has_state:  # the second row's state belongs to another document
        documents = documents._replace(before=torch.tensor([0, 7], dtype=torch.int32))
    actual = channel_delta_rule_eager(*inputs, documents, state, chunk=4)
    expected = delta_rule_by_token(inputs, documents, state)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)
    seeds_of = [torch.randn_like(x) for x in actual]
    learned = inputs if state is None else (*inputs, state)
    grads = (torch.autograd.grad(results, learned, seeds_of, allow_unused=True) for results in (actual, expected))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_gradients_match_finite_differences() -> None:
    """Gradients with respect to all inputs and the state equal finite differences."""
    documents = create_documents([[3, 3], [6]])._replace(before=torch.zeros(2, dtype=torch.int32))
    q, k, v, g, beta = draw_decays_by_channel(draw_recurrence(6, (1, 2), (2, 3)))
    inputs = requiring_grad(q, k, v, g.clamp(min=-3), beta, torch.randn(2, 2, 2, 3, dtype=torch.float64))

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return channel_delta_rule_eager(q, k, v, g, beta, documents, state, chunk=4)

    assert torch.autograd.gradcheck(rule, inputs)


@settings(max_examples=20)
@given(seeds, st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 4), st.sampled_from([1, 2, 8]))
def test_documents_are_isolated_to_the_bit(_seed: object, lengths: list[int], number: int, chunk: int) -> None:
    """Replacing other documents changes no bit of a document, and its loss has zero gradients elsewhere."""
    documents = create_documents([lengths])
    ours = documents.ids[0] == number % len(lengths)
    inputs, others = (draw_decays_by_channel(draw_recurrence(sum(lengths), rows=1)).learned() for _ in range(2))
    replaced = replace_tokens(inputs, others, ours)
    actual, changed = (channel_delta_rule_eager(*x, documents, chunk=chunk)[0][:, ours] for x in (inputs, replaced))
    assert torch.equal(actual, changed)
    for grad in torch.autograd.grad(actual.square().sum(), inputs):
        assert not bool(grad[:, ~ours].any())


def test_equal_decays_give_the_gated_delta_rule() -> None:
    """If all channels of a head decay alike, results and states equal the rule with a decay by head, in float32."""
    documents, inputs = create_documents([[70, 30], [100]]), draw_recurrence(100, widths=(8, 12)).map(Tensor.float)
    inputs = inputs._replace(g=inputs.g.clamp(min=-5))
    actual = channel_delta_rule_eager(*inputs._replace(g=inputs.g[..., None].expand(-1, -1, -1, 8)), documents)
    torch.testing.assert_close(actual, delta_rule_eager(*inputs, documents), atol=1e-5, rtol=1e-5)


def test_flash_linear_attention_has_the_same_rule() -> None:
    """The result equals flash-linear-attention's naive formula, for one document."""
    q, k, v, g, beta = draw_decays_by_channel(draw_recurrence(90, (4, 4), (16, 8)))
    actual, last = channel_delta_rule_eager(q, k, v, g, beta, create_documents([[90], [90]]))
    # fla/ops/kda/naive.py, naive_recurrent_kda, without its scale of the queries.
    state, outputs = v.new_zeros(2, 4, 16, 8), torch.zeros_like(v)
    for token in range(90):
        key, value, decay, strength = k[:, token], v[:, token], g[:, token], beta[:, token]
        state = state * decay[..., None].exp()
        error = value - (key[..., None] * state).sum(-2)
        state = state + torch.einsum("bhk,bhv->bhkv", strength[..., None] * key, error)
        outputs[:, token] = torch.einsum("bhk,bhkv->bhv", q[:, token], state)
    torch.testing.assert_close((actual, last), (outputs, state), rtol=1e-10, atol=1e-11)


def test_transformers_has_the_same_rule() -> None:
    """The result equals transformers' implementation in torch, for one document."""
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, g, beta = (x.float() for x in draw_decays_by_channel(draw_recurrence(150, (4, 4), (16, 8))))
    g = g.clamp(min=-5)
    actual, state = channel_delta_rule_eager(q, k, v, g, beta, create_documents([[150], [150]]))
    expected, last = module.chunk_kimi_delta_attention(q * 4, k, v, g, beta, output_final_state=True)
    torch.testing.assert_close((actual, state), (expected, last), atol=2e-4, rtol=2e-4)


def test_bfloat16_and_empty_rows_are_accepted() -> None:
    """Half precision is rounded only on the way in and out; without rows or tokens the result is empty."""
    documents, inputs = create_documents([[70, 30], [100]]), draw_decays_by_channel(draw_recurrence(100))
    half = inputs.map(Tensor.bfloat16)
    actual, state = channel_delta_rule_eager(*half, documents)
    exact, _ = delta_rule_by_token(half.map(Tensor.double), documents)
    assert (actual.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(actual.double(), exact, atol=0.01, rtol=0.01)
    for rows, length in ((0, 4), (2, 0)):
        empty = draw_decays_by_channel(draw_recurrence(length, rows=rows))
        documents = number_recurrent_documents(torch.zeros(rows, length, dtype=torch.int64))
        mixed, state = channel_delta_rule_eager(*empty, documents)
        assert mixed.shape == (rows, length, 4, 5) and not bool(state.any())
