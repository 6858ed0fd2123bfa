"""
Masks for recurrent operations.

Under context parallelism: the state after a row's piece is an affine function of the state before,
S -> M S + B. Every rank computes (B, M) for its pieces in one call, as values beside the identity; ranks exchange these
and apply the pieces before their own, and a second call computes the results. A document border in a piece makes M
zero.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.documents import RecurrentDocuments, number_recurrent_documents
from drawloom.ports import KeyValueCache, RowPart

Rule = Callable[..., tuple[Tensor, Tensor]]
Inputs = tuple[Tensor, ...]
"""q, k, v, g and perhaps beta of a recurrence, (rows, length, heads, ...)."""


class WholeMask(NamedTuple):
    """Documents in whole rows for recurrent operations, with or without a cache for the states after earlier tokens."""

    documents: RecurrentDocuments
    cache: KeyValueCache | None

    @classmethod
    def from_document_ids(cls, document_ids: Tensor, cache: KeyValueCache | None) -> Self:
        """Return the mask for document ids int64 (rows, length); a cached state continues a row's only document."""
        documents = number_recurrent_documents(document_ids)
        if cache is not None and cache.length:
            documents = documents._replace(before=documents.ids[:, 0])
        return cls(documents, cache)

    def convolve(self, function: Callable[..., Tensor], x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        """Apply a causal convolution to x (rows, length, channels), which continues the cached tokens, if any."""
        ids = self.documents.ids
        if self.cache is None:
            return function(x, weight, ids, silu)
        history, taps = self.cache.read_next_state(), weight.shape[1]
        both = x if history is None else torch.cat([history, x], 1)
        self.cache.replace_last_read_state(both[:, max(0, both.shape[1] - taps + 1) :].detach().clone())
        return function(both, weight, ids.new_zeros(both.shape[:2]), silu)[:, both.shape[1] - x.shape[1] :]

    def apply_rule(self, rule: Rule, inputs: Inputs) -> Tensor:
        """Apply a recurrence; with a cache, start from the cached state and store the new one."""
        if self.cache is None:
            return rule(*inputs, self.documents)[0]
        mixed, state = rule(*inputs, self.documents, self.cache.read_next_state())
        self.cache.replace_last_read_state(state.detach())
        return mixed


class PieceMask(NamedTuple):
    """
    Mask for this rank's pieces of every row, which become rows: `ids` int32 (rows, pieces, tokens).

    `row_ids` int32 (rows, length) are for whole rows, and `starts` int64 (pieces,) the pieces' first tokens in the row.
    """

    ids: Tensor
    row_ids: Tensor
    starts: Tensor
    part: RowPart

    @classmethod
    def gather_from_document_ids(cls, document_ids: Tensor, part: RowPart) -> Self:
        """Return the mask for document ids int64 (rows, tokens) for this rank's tokens."""
        row_ids = number_recurrent_documents(part.gather(document_ids)).ids
        places = part.token_indices.view(len(part.piece_indices), -1)
        return cls(row_ids[:, places], row_ids, places[:, 0], part)

    def convolve(self, function: Callable[..., Tensor], x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        """Apply a causal convolution to x (rows, tokens, channels), behind the previous pieces' last tokens."""
        lags = weight.shape[1] - 1
        pieces = self._split_pieces(x)
        history = self._gather_tokens_before_pieces(pieces, lags)
        ids = torch.cat([self._document_ids_before_pieces(lags).flatten(0, 1), self.ids.flatten(0, 1)], 1)
        return function(torch.cat([history, pieces], 1), weight, ids, silu)[:, lags:].reshape(x.shape)

    def _gather_tokens_before_pieces(self, pieces: Tensor, lags: int) -> Tensor:
        """Return the `lags` tokens before every piece, zeros before the row: (rows * pieces, lags, channels)."""
        kept = min(lags, pieces.shape[1])
        tails = pieces[:, pieces.shape[1] - kept :].view(-1, len(self.part.piece_indices), kept, pieces.shape[2])
        # (rows, lags + all pieces * kept, channels): piece p's history begins at p * kept. Pieces shorter than `lags`
        # are kept whole, so a history has tokens from several pieces.
        padded_tails = F.pad(self.part.gather_pieces(tails).flatten(1, 2), (0, 0, lags, 0))
        histories = [padded_tails[:, piece * kept :][:, :lags] for piece in self.part.piece_indices]
        return torch.stack(histories, 1).flatten(0, 1)

    def apply_rule(self, rule: Rule, inputs: Inputs) -> Tensor:
        """Apply a recurrence to the states after the previous pieces."""
        q, k, v, *factors = (self._split_pieces(x) for x in inputs)
        documents = RecurrentDocuments(self.ids.flatten(0, 1), self._document_ids_before_pieces(1).flatten())
        heads, width, v_width = v.shape[2], k.shape[3], v.shape[3]
        # First call: values beside zeros (pieces, tokens, heads, V + K), and states, zeros beside the identity (pieces,
        # heads, K, V + K). The last states are B beside M; the queries, and results, do not matter.
        values = torch.cat([v, v.new_zeros(*v.shape[:3], width)], 3)
        state = torch.eye(width, v_width + width, device=v.device, dtype=torch.float32)
        state = state.roll(v_width, 1).expand(len(v), heads, -1, -1)
        _, maps = rule(k, k, values, *factors, documents, state)
        by_piece = maps.unflatten(0, (-1, len(self.part.piece_indices)))  # type: ignore[no-untyped-call]
        # Second call: from the states before the pieces, (rows, pieces, heads, K, V).
        incoming = self._gather_and_compute_states_before_pieces(by_piece, v_width)
        mixed, _ = rule(q, k, v, *factors, documents, incoming.flatten(0, 1))
        return mixed.reshape(inputs[2].shape)

    def _gather_and_compute_states_before_pieces(self, own: Tensor, v_width: int) -> Tensor:
        """
        Return the states before this rank's pieces: (rows, pieces, heads, K, V).

        `own` (..., K, V + K) has, by piece, a summand and a factor: the piece changes state S to factor @ S + summand.
        """
        maps = self.part.gather_pieces(own)
        states = [torch.zeros_like(maps[:, 0, ..., :v_width])]
        for piece in range(maps.shape[1] - 1):
            added, factor = maps[:, piece, ..., :v_width], maps[:, piece, ..., v_width:]
            states.append(factor @ states[-1] + added)
        # Selected from all, so that `maps` has a gradient on every rank: its backward pass is a collective.
        before = torch.stack(states, 1)
        return torch.stack([before[:, piece] for piece in self.part.piece_indices], 1)

    def _split_pieces(self, x: Tensor) -> Tensor:
        """Split rows into pieces: x (rows, tokens, ...) becomes (rows * pieces, tokens / pieces, ...)."""
        return x.reshape(len(x) * len(self.part.piece_indices), -1, *x.shape[2:])

    def _document_ids_before_pieces(self, count: int) -> Tensor:
        """Return the documents of the `count` tokens before every piece, int32 (rows, pieces, count); -1 if none."""
        places = self.starts[:, None] + torch.arange(-count, 0, device=self.starts.device)
        return torch.where(places < 0, -1, self.row_ids[:, places.clamp(min=0)])


def create_recurrence_mask(
    documents: Tensor, part: RowPart | None, cache: KeyValueCache | None
) -> WholeMask | PieceMask:
    """Return the mask for document ids int64 (rows, length), of whole rows or of this rank's part of every row."""
    if part is None:
        return WholeMask.from_document_ids(documents, cache)
    return PieceMask.gather_from_document_ids(documents, part)
