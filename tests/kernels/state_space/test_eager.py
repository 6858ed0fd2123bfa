"""Mamba-2's recurrence in chunks, against a loop over tokens and transformers."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.documents import RecurrentDocuments, number_recurrent_documents
from drawloom.kernels.state_space.eager import state_space_eager
from support.recurrences import create_documents, draw_recurrence, replace_tokens

LAYOUTS = {
    "borders at, before and inside chunks": [[4, 8], [3, 1, 8]],
    "a document over three chunks, and a length that no chunk divides": [[5, 2, 3], [10]],
}
"""Lengths of documents in two rows; chunks have 4 tokens."""


def run_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: RecurrentDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the results and the last states of a loop over tokens; a token of another document clears the state."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    before, results = documents.before, []
    for token in range(v.shape[1]):
        kept = torch.where(documents.ids[:, token] == before, 1.0, 0.0)[:, None] * g[:, token].exp()
        state = kept[..., None, None] * state + torch.einsum("rhk,rhv->rhkv", k[:, token], v[:, token])
        results.append(torch.einsum("rhkv,rhk->rhv", state, q[:, token]))
        before = documents.ids[:, token]
    return torch.stack(results, 1), state


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_chunks_equal_a_loop_over_tokens(lengths: list[list[int]]) -> None:
    """For any borders and decays, results, states and gradients equal the recurrence's, also from a state."""
    # The second row's state belongs to another document.
    documents = create_documents(lengths)._replace(before=torch.tensor([0, 7], dtype=torch.int32))
    q, k, v, g, _ = draw_recurrence(documents.ids.shape[1])
    state = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    learned = [x.requires_grad_() for x in (q, k, v, g, state)]
    actual = state_space_eager(q, k, v, g, documents, state, chunk=4)
    expected = run_by_token(q, k, v, g, documents, state)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)
    seeds = [torch.randn_like(x) for x in actual]
    grads = (torch.autograd.grad(results, learned, seeds) for results in (actual, expected))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_documents_are_isolated_to_the_bit() -> None:
    """Replacing other documents changes no bit of a document, and its loss has zero gradients elsewhere."""
    documents = create_documents([[3, 6, 2]])
    ours = documents.ids[0] == 1
    inputs, others = (draw_recurrence(11, rows=1).learned() for _ in range(2))
    replaced = replace_tokens(inputs, others, ours)
    actual, changed = (state_space_eager(*x[:4], documents, chunk=4)[0][:, ours] for x in (inputs, replaced))
    assert torch.equal(actual, changed)
    for grad in torch.autograd.grad(actual.square().sum(), inputs[:4]):
        assert not bool(grad[:, ~ours].any())


def test_transformers_has_the_same_rule() -> None:
    """In float32, and with decays whose sums lose small ones, results equal transformers' scan for one document."""
    module = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    c, b, x, _, _ = (part.float() for part in draw_recurrence(150))
    steps, rates = torch.rand(2, 150, 4), -torch.tensor([0.1, 1.0, 10.0, 300.0])
    actual = state_space_eager(c, b, x * steps[..., None], rates * steps, create_documents([[150], [150]]))
    mixed, last = module.mamba2_chunk_scan(x, steps, rates, b, c, chunk_size=64, return_final_states=True)
    torch.testing.assert_close(actual, (mixed, last.mT), atol=1e-5, rtol=1e-5)


def test_bfloat16_and_empty_rows_are_accepted() -> None:
    """Half precision is rounded only on the way in and out; without tokens the result is empty."""
    documents, inputs = create_documents([[70, 30], [100]]), draw_recurrence(100).map(Tensor.bfloat16)
    actual, state = state_space_eager(*inputs[:4], documents)
    zero = torch.zeros(2, 4, 6, 5, dtype=torch.float64)
    exact, _ = run_by_token(*inputs.map(Tensor.double)[:4], documents, zero)
    assert (actual.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(actual.double(), exact, atol=0.02, rtol=0.02)
    documents = number_recurrent_documents(torch.zeros(2, 0, dtype=torch.int64))
    mixed, state = state_space_eager(*draw_recurrence(0)[:4], documents)
    assert mixed.shape == (2, 0, 4, 5) and not bool(state.any())
