"""The order of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.order.permutation import MAX_SORTED, Permutation

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 10**6)
counts = st.integers(0, 300)


def reference(seed: int, purpose: str, epoch: int, count: int) -> list[int]:
    """Return the same permutation in plain integers, as in the paper on SplitMix64."""
    from hashlib import blake2b

    state = int.from_bytes(blake2b(f"{purpose} {seed} {epoch}".encode(), digest_size=8).digest(), "big")
    keys = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        keys.append(z ^ (z >> 31))
    return sorted(range(count), key=keys.__getitem__)


@given(seeds, epochs, counts)
def test_the_permutation_equals_splitmix64(seed: int, epoch: int, count: int) -> None:
    """Array arithmetic equals unbounded integers for every seed, and uses each index once."""
    order = Permutation(seed, "rows", epoch, count).permute_all()
    assert order.dtype == np.int64
    assert order.tolist() == reference(seed, "rows", epoch, count)
    assert sorted(order.tolist()) == list(range(count))


def feistel(seed: int, epoch: int, count: int, index: int) -> int:
    """Return the item at an index of many, in plain integers."""
    from hashlib import blake2b

    def mix_bits(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    stream = int.from_bytes(blake2b(f"rows {seed} {epoch}".encode(), digest_size=8).digest(), "big")
    keys = [mix_bits((number * 0x9E3779B97F4A7C15 + stream) % 2**64) for number in range(1, 5)]
    bits = (count - 1).bit_length()
    while True:
        left_bits, right_bits = bits // 2, bits - bits // 2
        left, right = index >> right_bits, index % 2**right_bits
        for key in keys:
            z = (right + key) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 32)) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (z >> (64 - left_bits))
            left_bits, right_bits = right_bits, left_bits
        index = left << right_bits | right
        if index < count:
            return index


@given(seeds, epochs, st.integers(MAX_SORTED + 1, 2**40), st.data())
def test_large_permutations_equal_a_feistel_network(seed: int, epoch: int, count: int, data: st.DataObject) -> None:
    """Above 2^20 items each is computed from its position alone, as in unbounded integers."""
    positions = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
    items = Permutation(seed, "rows", epoch, count).get_items_at(np.array(positions, np.int64))
    assert items.dtype == np.int64
    assert items.tolist() == [feistel(seed, epoch, count, position) for position in positions]


def test_many_items_come_once_each() -> None:
    """All 2^20 + 3 items come once, neighbours are apart, and windows agree with the whole order."""
    count = MAX_SORTED + 3
    items = Permutation(5, "rows", 0, count).permute_all()
    assert np.bincount(items, minlength=count).tolist() == [1] * count
    assert abs(np.corrcoef(items, np.arange(count))[0, 1]) < 0.01
    places = np.array([0, 5000, 4095, 4096])
    assert Permutation(5, "rows", 0, count).get_items_at(places).tolist() == items[places].tolist()


def test_seed_epoch_and_purpose_each_matter() -> None:
    """A change of seed, epoch or purpose changes the permutation."""
    keys = [(seed, purpose, epoch) for seed in (0, 1) for purpose in ("rows", "documents") for epoch in (0, 1)]
    assert (
        len({tuple(Permutation(seed, purpose, epoch, 50).permute_all().tolist()) for seed, purpose, epoch in keys}) == 8
    )


def test_every_row_is_first_equally_often() -> None:
    """Over 20,000 epochs all 5 rows are first 4,000 times, to five standard deviations."""
    first = np.bincount([Permutation(3, "rows", epoch, 5).permute_all()[0] for epoch in range(20_000)], minlength=5)
    assert np.abs(first - 4_000).max() < 5 * (20_000 * 0.2 * 0.8) ** 0.5
