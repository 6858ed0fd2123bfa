"""
The gated delta rule with a decay for every key channel (Kimi Delta Attention, Kimi team 2025, arXiv 2510.26692).

For every head and token the state S (K, V), zero where a document starts, becomes E S + k u^T with E = diag(exp(g))
and u = beta (v - (E S)^T k); the result is S^T q.

As in `gated_delta/eager.py`, all u in a chunk solve a triangular system, and only the state goes from chunk to chunk.
In the products k_i^T exp(G_i - G_j) k_j every channel has another decay. They are matrix products all the same: the
tokens are halved again and again, and between two halves both factors are decays from or to the border. So no exponent
is positive, for any g.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.operation import accumulation_dtype

CHUNK = 64
"""Tokens in a chunk, a power of 2."""


def channel_delta_rule_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: RecurrentDocuments,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """
    Return results (rows, length, value_heads, V), in v's dtype, and the state after the last token.

    Like `delta_rule_eager`, but g, at most 0, is (rows, length, value_heads, K).
    """
    dtype, result_dtype, (rows, length, heads, width) = accumulation_dtype(v), v.dtype, v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(rows, heads, k.shape[3], width, dtype=dtype) if state is None else state.to(dtype)
    if not v.numel():
        return torch.zeros_like(v), state
    q, k, v, g, beta = (split_into_chunks(x.to(dtype), chunk) for x in (q, k, v, g, beta))
    ids, before = split_documents_into_chunks(documents, chunk)
    # Tokens of the incoming state's document come first in a chunk, and tokens of the outgoing state's last.
    from_state = exp_where(ids == before[..., None], g.cumsum(-2))
    to_end = exp_where(ids == ids[..., -1:], _sum_later_tokens(g))
    by_query, by_key = _multiply_decayed_pairs(torch.stack([q, k]), k, g, ids)
    inputs = beta[..., None] * torch.cat([v, from_state * k], -1)
    solved = torch.linalg.solve_triangular(beta[..., None] * by_key, inputs, upper=False, unitriangular=True)
    values, keys = solved[..., :width], solved[..., width:]
    to_state, kept = (to_end * k).mT, from_state[..., -1, :, None]
    states, written = [], []
    for number in range(v.shape[2]):
        states.append(state)
        written.append(values[:, :, number] - keys[:, :, number] @ state)
        state = kept[:, :, number] * state + to_state[:, :, number] @ written[-1]
    by_query = by_query + torch.diag_embed((q * k).sum(-1))
    mixed = (from_state * q) @ torch.stack(states, 2) + by_query @ torch.stack(written, 2)
    return mixed.movedim(1, 3).flatten(1, 2)[:, :length].to(result_dtype), state


def split_into_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x (rows, length, heads, ...) as (rows, heads, chunks, chunk, ...), with zeros after the end."""
    padded = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, -x.shape[1] % chunk))
    chunks: Tensor = padded.unflatten(1, (-1, chunk))  # type: ignore[no-untyped-call]
    return chunks.movedim(3, 1)


def split_documents_into_chunks(documents: RecurrentDocuments, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the tokens' documents (rows, 1, chunks, chunk), and the documents before every chunk (rows, 1, chunks)."""
    ids, (rows, length) = documents.ids, documents.ids.shape
    # Tokens after the end write nothing, and belong to the last document, so that its state stays.
    ids = torch.cat([ids, ids[:, -1:].expand(-1, -length % chunk)], 1).view(rows, 1, -1, chunk)
    return ids, torch.cat([documents.before.view(rows, 1, 1), ids[:, :, :-1, -1]], 2)


def exp_where(exists: Tensor, exponents: Tensor) -> Tensor:
    """Return exp(exponents) (..., tokens, K) for the tokens that exist, bool (..., tokens), and 0 for others."""
    return torch.where(exists[..., None], exponents, -torch.inf).exp()


def _sum_later_tokens(x: Tensor) -> Tensor:
    """Sum x (..., tokens, K) over the tokens after every token."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _multiply_decayed_pairs(left: Tensor, right: Tensor, g: Tensor, ids: Tensor) -> Tensor:
    """
    Return left_i . right_j, decayed from j to i, for tokens i after j in the same document, and 0 elsewhere: (...,
    chunk, chunk).

    left (..., chunk, K), right and g (rows, heads, chunks, chunk, K), ids (rows, 1, chunks, chunk); chunk is a power
    of two.
    """
    # products (..., chunk / size, size, size) are the finished diagonal blocks; a round joins two and two, and `across`
    # is the lower left quarter of the joined block.
    products, size = left.new_zeros(*left.shape[:-1], 1, 1), 1
    while size < ids.shape[-1]:
        documents, decays, lefts, rights = (
            torch.unflatten(x, dim, (-1, 2, size)) for x, dim in ((ids, -1), (g, -2), (left, -2), (right, -2))
        )
        border_document = documents[..., 0, -1:]
        to_border = exp_where(documents[..., 0, :] == border_document, _sum_later_tokens(decays[..., 0, :, :]))
        from_border = exp_where(documents[..., 1, :] == border_document, decays[..., 1, :, :].cumsum(-2))
        later = lefts[..., 1, :, :] * from_border
        earlier = rights[..., 0, :, :] * to_border
        across = later @ earlier.mT
        halves = torch.unflatten(products, -3, (-1, 2))
        upper_rows = torch.cat([halves[..., 0, :, :], torch.zeros_like(across)], -1)
        products = torch.cat([upper_rows, torch.cat([across, halves[..., 1, :, :]], -1)], -2)
        size *= 2
    return products.squeeze(-3)
