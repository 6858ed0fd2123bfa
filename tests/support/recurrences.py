"""Gated delta rules token by token, with decays by head or by key channel, and inputs for their implementations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.documents import RecurrentDocuments, number_recurrent_documents


class Inputs(NamedTuple):
    """Inputs of the gated delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the inputs after a function of each tensor."""
        return Inputs(*map(function, self))

    def learned(self) -> "Inputs":
        """Return copies with gradients."""
        return self.map(lambda x: x.detach().clone().requires_grad_())


def create_documents(
    lengths: list[list[int]], has_state: bool = False, device: torch.device | None = None
) -> RecurrentDocuments:
    """
    Return documents with these lengths by row; a state belongs to the first document in the first row, and to none
    after.
    """
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    documents = number_recurrent_documents(torch.stack(ids).to(device))
    before = torch.arange(len(lengths), dtype=torch.int32, device=device) * 99
    return documents._replace(before=before) if has_state else documents


def delta_rule_by_token(
    inputs: Inputs, documents: RecurrentDocuments, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results and the last states of a loop over tokens, in the inputs' dtype."""
    q, k, v, g, beta = inputs
    (rows, length, heads, width), group = v.shape, v.shape[2] // k.shape[2]
    zero = v.new_zeros(rows, heads, k.shape[3], width)
    # Document by document, so that nothing of a document can reach another one.
    results, lasts = [], []
    for row in range(rows):
        current, number = zero[row], -1
        if state is not None:
            current, number = state[row].to(v.dtype), int(documents.before[row])
        for token in range(length):
            if int(documents.ids[row, token]) != number:
                current, number = zero[row], int(documents.ids[row, token])
            key, query = (x[row, token].repeat_interleave(group, 0) for x in (k, q))
            current = g[row, token].exp().view(heads, -1, 1) * current
            error = v[row, token] - torch.einsum("hkv,hk->hv", current, key)
            current = current + torch.einsum("hk,hv->hkv", key, beta[row, token][:, None] * error)
            results.append(torch.einsum("hkv,hk->hv", current, query))
        lasts.append(current)
    return torch.stack(results).view(v.shape), torch.stack(lasts)


def draw_recurrence(
    length: int, heads: tuple[int, int] = (2, 4), widths: tuple[int, int] = (6, 5), rows: int = 2
) -> Inputs:
    """Return float64 inputs with unit keys, decays from 0 to -20 and one of -1e4, and beta from 0 to 2."""
    q, k = torch.randn(2, rows, length, heads[0], widths[0], dtype=torch.float64)
    v = torch.randn(rows, length, heads[1], widths[1], dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    if length > 3:
        k[:, 2], k[:, 3] = k[:, 1], 0
    g = -20 * torch.rand(rows, length, heads[1], dtype=torch.float64) ** 8
    beta = 2 * torch.rand(rows, length, heads[1], dtype=torch.float64)
    if length > 2:
        g[:1, length // 2], beta[:1, 1] = -1e4, torch.arange(heads[1]) % 3.0
    return Inputs(q * widths[0] ** -0.5, k, v, g, beta)


def draw_decays_by_channel(inputs: Inputs) -> Inputs:
    """
    Return inputs whose decays, (rows, length, heads, K), differ from channel to channel.

    In all rows but the first, one channel in the first head decays by exp(-30) from token to token.
    """
    g = inputs.g[..., None] * torch.rand(*inputs.g.shape, inputs.k.shape[-1], dtype=torch.float64)
    g[1:, :, :1, 0] = -30
    return inputs._replace(g=g)


def requiring_grad(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return trainable copies."""
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def replace_tokens(inputs: Inputs, others: Inputs, kept: Tensor) -> Inputs:
    """Return inputs with tokens of others, except for the tokens `kept`, bool (length,)."""
    return Inputs(
        *(torch.where(kept.view(1, -1, *[1] * (x.ndim - 2)), x, y) for x, y in zip(inputs, others, strict=True))
    )
