"""
Recurrence whose state decays and adds keys times values (Dao and Gu 2024, Mamba-2, arXiv 2405.21060, section 6).

For every head and token the state S (K, V), zero where a document starts, becomes exp(g) S + k v^T; the result is
S^T q. Chunks are computed at once, as attention whose weights decay, and only the state goes from chunk to chunk.
"""

import torch
from torch import Tensor

from drawloom.kernels.channel_delta.eager import CHUNK, exp_where, split_documents_into_chunks, split_into_chunks
from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.operation import accumulation_dtype


def state_space_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    documents: RecurrentDocuments,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """
    Return results (rows, length, value_heads, V), in v's dtype, and the state after the last token.

    Like `delta_rule_eager`, but without beta.
    """
    dtype, result_dtype, (rows, length, heads, width) = accumulation_dtype(v), v.dtype, v.shape
    state = v.new_zeros(rows, heads, k.shape[3], width, dtype=dtype) if state is None else state.to(dtype)
    if not v.numel():
        return torch.zeros_like(v), state
    q, k, v, g = (split_into_chunks(x.to(dtype), chunk) for x in (q, k, v, g))
    ids, before = split_documents_into_chunks(documents, chunk)
    # Sums from token to token: a difference of sums over the chunk would lose the small ones beside a large decay.
    sums = g[..., None].expand(*g.shape, chunk).tril(-1).cumsum(-2)
    decays = torch.where((ids[..., None] == ids[..., None, :]).tril(), sums, -torch.inf).exp()
    from_state = exp_where(ids == before[..., None], g.cumsum(-1)[..., None])
    group = heads // k.shape[1]
    scores = (q @ k.mT).repeat_interleave(group, 1)
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    added, kept, states = k.mT @ (decays[..., -1, :, None] * v), from_state[..., -1:, :], []
    for number in range(v.shape[2]):
        states.append(state)
        state = kept[:, :, number] * state + added[:, :, number]
    mixed = from_state * (q @ torch.stack(states, 2)) + (scores * decays) @ v
    return mixed.movedim(1, 3).flatten(1, 2)[:, :length].to(result_dtype), state
