"""Pieces of rows on a rank whose neighbours are imaginary: their tokens are known, and what is sent to them is kept."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


class ImaginaryRanks:
    """
    An exchange for the pieces at `indices` of rows that are known whole, (rows, length, ...).

    `sent` are the last addends for other ranks' tokens; these send none.
    """

    def __init__(self, indices: tuple[int, ...], pieces: int, whole: Tensor) -> None:
        self.piece_indices, self.whole = indices, whole.detach()
        self.sent = whole.new_tensor(math.nan)
        places = torch.arange(whole.shape[1], device=whole.device).view(pieces, -1)
        own = torch.zeros(pieces, dtype=torch.bool, device=whole.device)
        own[list(indices)] = True
        self.token_indices, self.others = places[own].flatten(), places[~own].flatten()

    def gather(self, part: Tensor) -> Tensor:
        return self.whole.index_copy(1, self.token_indices, part)

    def gather_pieces(self, own: Tensor) -> Tensor:
        raise NotImplementedError("attention gathers tokens")

    def start_gathering_others(self, own: Tensor) -> Callable[[], Tensor]:
        assert torch.equal(own, self.whole[:, self.token_indices])
        return lambda: self.whole[:, self.others]

    def start_summing_for_owners(self, others: Tensor) -> Callable[[], Tensor]:
        self.sent = others
        return lambda: torch.zeros_like(self.whole[:, self.token_indices])
