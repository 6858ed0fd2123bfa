"""
Permutations of rows and documents that depend only on (seed, purpose, epoch, position).

Up to 2^20 items are sorted by pseudo-random keys: SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators") of (stream + index). It is a bijection of 64 bits, so all keys differ; the stream is a hash of seed,
purpose and epoch. More items are permuted one by one, without memory: a Feistel network of four rounds (Luby and
Rackoff 1988) over the next power of two, applied again to results out of range ("cycle walking", Black and Rogaway
2002). The network is biased for few items, so few items are sorted.

Integer arithmetic is the same on every machine and in every version of numpy, whose own generators may change.
"""

from functools import cached_property
from hashlib import blake2b

import attrs
import numpy as np

MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MAX_SORTED = 2**20
BLOCK = 2**15  # indices per step; intermediate values of that many fit a core's cache
ROUNDS = 4


@attrs.frozen
class Permutation:
    """A permutation of range(count)."""

    seed: int
    purpose: str
    epoch: int
    count: int

    def permute_all(self) -> np.ndarray:
        """
        Return all items in permuted order: int64 (count,), or int32 for more than MAX_SORTED items if it suffices.
        """
        if self.count <= MAX_SORTED:
            return self._items_in_order
        items = np.empty(self.count, np.int32 if self.count <= 2**31 else np.int64)
        for start in range(0, self.count, BLOCK):
            end = min(start + BLOCK, self.count)
            items[start:end] = self._permute_positions(np.arange(start, end, dtype=np.uint64))
        return items

    def get_items_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the items at these positions, int64 (positions,)."""
        return (
            self._items_in_order[positions]
            if self.count <= MAX_SORTED
            else self._permute_positions(positions.astype(np.uint64))
        )

    def compute_random_keys(self, items: np.ndarray) -> np.ndarray:
        """Return distinct pseudo-random numbers for the items, uint64 (items,)."""
        keys = items.astype(np.uint64)
        keys += np.uint64(1)
        keys *= GAMMA
        keys += self._key_offset
        _mix_bits_in_place(keys)
        return keys

    @cached_property
    def _key_offset(self) -> np.uint64:
        """Offset for all keys: a hash over seed, purpose and epoch."""
        digest = blake2b(f"{self.purpose} {self.seed} {self.epoch}".encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "big"))

    @cached_property
    def _items_in_order(self) -> np.ndarray:
        """All items in permuted order, int64 (count,); only for few items."""
        # all keys differ, so every sorting algorithm returns the same order
        return np.argsort(self.compute_random_keys(np.arange(self.count))).astype(np.int64)

    def _permute_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the items at the positions, uint64, by applying the network until every result is in range."""
        positions = self._apply_feistel_network(positions)
        while len(outside := np.flatnonzero(positions >= self.count)):
            positions[outside] = self._apply_feistel_network(positions[outside])
        return positions.astype(np.int64)

    def _apply_feistel_network(self, numbers: np.ndarray) -> np.ndarray:
        """Permute numbers, uint64 and below the next power of two, by a Feistel network."""
        bits = (self.count - 1).bit_length()
        left_bits, right_bits = bits // 2, bits - bits // 2
        left, right = numbers >> np.uint64(right_bits), numbers & np.uint64(2**right_bits - 1)
        for key in self._round_keys:
            # a multiplicative hash, whose highest bits depend on all of its input
            mixed = right + key
            mixed *= MIX_1
            mixed ^= mixed >> np.uint64(32)
            mixed *= MIX_2
            mixed >>= np.uint64(64 - left_bits)
            mixed ^= left
            left, right = right, mixed
            left_bits, right_bits = right_bits, left_bits
        left <<= np.uint64(right_bits)
        left |= right
        return left

    @cached_property
    def _round_keys(self) -> np.ndarray:
        """One key per round in the network, uint64 (ROUNDS,)."""
        keys = np.arange(1, ROUNDS + 1, dtype=np.uint64) * GAMMA + self._key_offset
        _mix_bits_in_place(keys)
        return keys


def _mix_bits_in_place(numbers: np.ndarray) -> None:
    """Apply SplitMix64's bijection to the numbers, uint64, in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= MIX_1
    numbers ^= numbers >> np.uint64(27)
    numbers *= MIX_2
    numbers ^= numbers >> np.uint64(31)
