"""Pieces of documents in packed rows."""

from typing import NamedTuple, Protocol

import numpy as np


class RowPiece(NamedTuple):
    """A document's tokens from `first` to before `last`."""

    document: int
    first: int
    last: int


class RowIndex(Protocol):
    """Pieces by row. Picklable, with arrays as tensors, which torch shares between processes."""

    @property
    def rows(self) -> int:
        """Row count."""

    @property
    def tokens(self) -> int:
        """Token count over all pieces."""

    def pieces(self, row: int) -> list[RowPiece]:
        """Return a row's pieces, in order. Raises IndexError beyond the last row."""

    def tokens_per_row(self) -> np.ndarray:
        """Return the token count per row, int64 (rows,)."""
