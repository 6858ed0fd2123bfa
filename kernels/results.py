"""Operations' results with several parts, named by ports."""

from typing import NamedTuple

from torch import Tensor


class TokenLosses(NamedTuple):
    """Cross entropies, and the log-sum-exp over logits, by token: both (...), at least float32."""

    losses: Tensor
    lse: Tensor


class NormAndSum(NamedTuple):
    """The norm of a sum, and the sum, both (..., hidden_size)."""

    normed: Tensor
    summed: Tensor


class PermutedRows(NamedTuple):
    """Copies of tokens, (rows, hidden_size), sorted by expert, and their probabilities, (rows,)."""

    rows: Tensor
    probabilities: Tensor
