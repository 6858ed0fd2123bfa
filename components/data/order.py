"""
The order of rows: a function of (seed, epoch, position) only.

An epoch is sorted by pseudo-random keys: SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators") of (stream + index). It is a bijection of 64 bits, so that no two keys are equal; the stream is a hash of
seed, purpose and epoch. Integer arithmetic is the same on every machine and in every version of numpy, whose own
generators may change.
"""

from collections.abc import Sequence
from hashlib import blake2b

import attrs
import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def permutation(seed: int, purpose: str, epoch: int, count: int) -> np.ndarray:
    """A permutation of range(count), int64 of shape (count,)."""
    digest = blake2b(f"{purpose} {seed} {epoch}".encode(), digest_size=8).digest()
    keys = np.arange(1, count + 1, dtype=np.uint64)
    keys *= GAMMA
    keys += np.uint64(int.from_bytes(digest, "big"))
    _mix(keys)
    # no keys are equal, so every sorting algorithm gives the same order
    order: np.ndarray = np.argsort(keys).astype(np.int64)
    return order


def _mix(x: np.ndarray) -> None:
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)


@attrs.define
class ShuffledOrder:
    """An endless order of rows 0 to `count` - 1: position p is row permutation(epoch = p // count)[p % count]."""

    seed: int
    count: int
    shuffle: bool
    _epoch: int = attrs.field(init=False, default=-1)
    _rows: np.ndarray | None = attrs.field(init=False, default=None)

    def rows(self, positions: Sequence[int]) -> list[int]:
        """The rows at these positions."""
        return [self._row(*divmod(position, self.count)) for position in positions]

    def _row(self, epoch: int, index: int) -> int:
        if not self.shuffle:
            return index
        # one epoch is kept: positions come in order, so that each permutation is computed once
        if self._rows is None or self._epoch != epoch:
            self._epoch, self._rows = epoch, permutation(self.seed, "rows", epoch, self.count)
        return int(self._rows[index])
