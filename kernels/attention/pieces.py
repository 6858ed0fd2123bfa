"""
Causal attention from this rank's pieces of rows with one document, while other ranks' keys and values are on their way.

A rank's own tokens are in order, so plain causal attention serves them. A piece attends to other
ranks' tokens before it without a mask; the results are merged by their log-sum-exp, and both compute gradients from the
merged result (Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889). Keys and values are
sent beside attention among own tokens in the forward pass, and their gradients in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.attention.flash import SoftmaxStatistics, StatisticsKernel
from drawloom.kernels.results import RowPart


class RowPieces(NamedTuple):
    """The mask for queries in pieces of rows with one document; keys and values are this rank's too."""

    part: RowPart


def gather_keys_and_values(part: RowPart, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gather k (rows, tokens, heads, head_dim) and v (rows, tokens, heads, v_dim) of whole rows in one collective."""
    return _split_keys_and_values(part.gather(_join_keys_and_values(k, v)), k, v)


def _join_keys_and_values(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(2), v.flatten(2)], 2)


def _split_keys_and_values(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (rows, length, heads, width) with k's and v's shapes of heads, as views."""
    keys, values = torch.split(joined, [k.shape[2:].numel(), v.shape[2:].numel()], 2)
    return keys.unflatten(2, k.shape[2:]), values.unflatten(2, v.shape[2:])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class PiecewiseKernel:
    """Attention for q, k and v of this rank's tokens: `causal` among themselves, and `full` to other ranks' tokens."""

    causal: StatisticsKernel
    full: StatisticsKernel
    part: RowPart

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the result (rows, tokens, heads, v_dim); statistics also keep other ranks' keys and values."""
        wait = self.part.start_gathering_others(_join_keys_and_values(k, v))
        mixed, (lse, state) = self.causal.forward(q, k, v)
        others = wait()
        keys, values = _split_keys_and_values(others, k, v)
        for piece, count in self._list_pieces(q.shape[1]):
            before, (lse_before, _) = self.full.forward(q[:, piece], keys[:, :count], values[:, :count])
            share = (lse_before - lse[:, piece]).sigmoid()[..., None]
            mixed[:, piece] = torch.lerp(mixed[:, piece].to(share.dtype), before.to(share.dtype), share)
            lse[:, piece] = torch.logaddexp(lse[:, piece], lse_before)
        return mixed, SoftmaxStatistics(lse, (others, *state))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, (others, *state) = statistics
        keys, values = _split_keys_and_values(others, k, v)
        grad_others, grads_of_pieces = torch.zeros_like(others), []
        grad_keys, grad_values = _split_keys_and_values(grad_others, k, v)
        for piece, count in self._list_pieces(q.shape[1]):
            inputs = grad[:, piece], q[:, piece], keys[:, :count], values[:, :count], mixed[:, piece]
            grads = self.full.backward(*inputs, SoftmaxStatistics(lse[:, piece], tuple(state)))
            grads_of_pieces.append((piece, grads[0]))
            grad_keys[:, :count] += grads[1]
            grad_values[:, :count] += grads[2]
        wait = self.part.start_summing_for_owners(grad_others)
        grad_q, grad_k, grad_v = self.causal.backward(grad, q, k, v, mixed, SoftmaxStatistics(lse, tuple(state)))
        for piece, grad_piece in grads_of_pieces:
            grad_q[:, piece] += grad_piece
        sums = _split_keys_and_values(wait(), k, v)
        return grad_q, grad_k + sums[0], grad_v + sums[1]

    def _list_pieces(self, tokens: int) -> Iterator[tuple[slice, int]]:
        """Yield the tokens of own pieces, with the number of other ranks' tokens before it, unless there are none."""
        indices = self.part.piece_indices
        length = tokens // len(indices)
        for number, index in enumerate(indices):
            if index > number:
                yield slice(number * length, (number + 1) * length), (index - number) * length
