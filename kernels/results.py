"""Operations' results with several parts, and a rank's part of rows; ports name them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class TokenLosses(NamedTuple):
    """Cross entropies, and the log-sum-exp over logits, by token: both (...), at least float32."""

    losses: Tensor
    lse: Tensor


class NormAndSum(NamedTuple):
    """The norm of a sum, and the sum, both (..., hidden_size)."""

    normed: Tensor
    summed: Tensor


class Routes(NamedTuple):
    """
    Routing tables, int32. A choice is one of a token's `top_k` experts; every choice has a row unless it is dropped.

    `dest_row` (tokens, top_k): the choice's row, or -1. `source_choice` (tokens * top_k,): the row's choice, as token *
    top_k + the index among the token's choices, or -1. `offsets` (experts,): the end of the expert's rows; expert 0
    begins at row 0. If the host knows how many rows there are, `source_choice` may be cut to that length: its length is
    the row count.
    """

    dest_row: Tensor
    source_choice: Tensor
    offsets: Tensor


class PermutedRows(NamedTuple):
    """Copies of tokens, (rows, hidden_size), sorted by expert, and their probabilities, (rows,)."""

    rows: Tensor
    probabilities: Tensor


class RowPart(Protocol):
    """This rank's tokens in every row, if several ranks share the rows (context parallelism)."""

    @property
    def token_indices(self) -> Tensor:
        """Indices of this rank's tokens in a row, int64 (tokens,), ascending."""

    def gather(self, part: Tensor) -> Tensor:
        """Gather whole rows (rows, length, ...) from every rank's `part` (rows, tokens, ...); differentiable."""

    @property
    def piece_indices(self) -> tuple[int, ...]:
        """
        Indices of this rank's pieces; all ranks' pieces are equally long runs of tokens, counted from the row's start.
        """

    def start_gathering_others(self, own: Tensor) -> Callable[[], Tensor]:
        """
        Start to gather from `own` (rows, tokens, ...); a call waits, and returns other ranks' tokens in order (rows,
        others, ...).
        """

    def start_summing_for_owners(self, others: Tensor) -> Callable[[], Tensor]:
        """
        Start to send addends for other ranks' tokens (rows, others, ...) to their ranks; a call waits, and returns the
        sum for this rank's tokens (rows, tokens, ...).
        """

    def gather_pieces(self, own: Tensor) -> Tensor:
        """
        Gather all ranks' values per piece, (rows, own pieces, ...), in the order of pieces along a row: (rows, all
        pieces, ...); differentiable.
        """
