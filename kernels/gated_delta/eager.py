"""
A causal convolution over tokens inside documents, channel by channel, with or without SiLU.

The gated delta rule: a recurrence over tokens, which writes values into a state under their keys.

For every head and token the state S (K, V), zero at the start of a document, becomes exp(g) S + k u^T, where
u = beta (v - exp(g) S^T k); the result is S^T q (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

Tokens are processed in chunks. Inside a chunk all u solve a triangular system, and only the state goes from chunk to
chunk. Documents need no alignment: a pair of tokens, and a token and the incoming state, count only if they belong to
one document, and the last document has the outgoing state.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.channel_delta.eager import channel_delta_rule_eager
from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.operation import accumulation_dtype, upcast


def causal_conv_eager(x: Tensor, weight: Tensor, ids: Tensor, silu: bool = True) -> Tensor:
    """
    Return silu(sum over lags: weight[:, taps - 1 - lag] * x[:, token - lag]), in the dtype of x; or the sum alone.

    x (rows, length, channels), weight (channels, taps), and ids int32 (rows, length), document numbers that never
    decrease along a row; tokens in earlier documents count as 0.
    """
    taps, wide = weight.shape[1], upcast(x)
    summed = wide * upcast(weight[:, -1])
    for lag in range(1, min(taps, x.shape[1])):
        is_same = (ids[:, lag:] == ids[:, :-lag])[..., None]
        earlier = torch.where(is_same, wide[:, :-lag], 0) * upcast(weight[:, taps - 1 - lag])
        summed = summed + F.pad(earlier, (0, 0, lag, 0))
    return (F.silu(summed) if silu else summed).to(x.dtype)


CHUNK = 64
"""Tokens in a chunk."""


def delta_rule_eager(
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
    Return results (rows, length, value_heads, V), in the dtype of v, and the state after the last token.

    q and k (rows, length, key_heads, K); v (rows, length, value_heads, V); g, a log decay, at most 0,
    and beta (rows, length, value_heads). value_heads / key_heads consecutive value heads share a key head. States are
    at least float32 (rows, value_heads, K, V); an incoming `state` belongs to the documents `documents.before`. With g
    (rows, length, value_heads, K), every key channel has a decay of its own.
    """
    if g.ndim > beta.ndim:
        return channel_delta_rule_eager(q, k, v, g, beta, documents, state, chunk)
    dtype, result_dtype, groups = accumulation_dtype(v), v.dtype, v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))  # (rows, heads, length, ...)
    if state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    state, results, before = state.to(dtype), [v[:, :, :0]], documents.before
    for first in range(0, v.shape[2], chunk):
        tokens = slice(first, first + chunk)
        ids = documents.ids[:, tokens]
        mixed, state = _process_chunk(
            _Chunk(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], g[:, :, tokens], beta[:, :, tokens]),
            *(ids, before, state),
        )
        before = ids[:, -1]
        results.append(mixed)
    return torch.cat(results, 2).transpose(1, 2).to(result_dtype), state


class _Chunk(NamedTuple):
    """Inputs for some tokens: q and k (rows, heads, tokens, K), v (..., V), g and beta (rows, heads, tokens)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _process_chunk(chunk: _Chunk, ids: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return results (rows, heads, tokens, V), and the next state (rows, heads, K, V)."""
    q, k, v, g, beta = chunk
    is_pair = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]  # (rows, 1, tokens, tokens)
    continues, lasts = ((ids == other[:, None])[:, None] for other in (before, ids[:, -1]))
    # Sums within a document: a difference of sums over the chunk would leave rounding errors of other documents.
    decays = torch.where(is_pair, g[:, :, None, :], 0).sum(-1)
    pair_decay = torch.where(is_pair, decays[..., None] - decays[..., None, :], -torch.inf).exp()
    from_state = torch.where(continues, decays, -torch.inf).exp()[..., None]
    to_end = torch.where(lasts, decays[..., -1:] - decays, -torch.inf).exp()[..., None]
    system = (beta[..., None] * (k @ k.mT) * pair_decay).tril(-1)
    values = beta[..., None] * (v - from_state * (k @ state))
    written = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    mixed = from_state * (q @ state) + (q @ k.mT * pair_decay) @ written
    return mixed, from_state[:, :, -1:] * state + (to_end * k).mT @ written
