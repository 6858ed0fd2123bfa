"""Best-fit-decreasing."""

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.best_fit import pack_by_best_fit


def lognormal(count: int) -> np.ndarray:
    """Return sizes distributed like documents, with a mean of about 900."""
    return np.clip(np.random.default_rng(0).lognormal(6.0, 1.2, count), 2, 4095).astype(np.int64)


def test_rows_are_nearly_full() -> None:
    """100,000 documents leave hardly any space, and a row's large items come first."""
    sizes = lognormal(100_000)
    items, counts = pack_by_best_fit(np.arange(len(sizes)), sizes, 4096)
    assert sizes.sum() / (len(counts) * 4096) > 0.9999
    assert np.sort(items).tolist() == list(range(len(sizes)))
    row = sizes[items[: counts[0]]]
    assert row.tolist() == sorted(row, reverse=True)


def test_items_that_fit_exactly_fill_rows() -> None:
    """Pairs whose sizes add up to a row leave nothing, in any order."""
    sizes = np.array([5, 3, 7, 1, 4, 4, 6, 2])
    items, counts = pack_by_best_fit(np.arange(8), sizes, 8)
    assert counts.tolist() == [2, 2, 2, 2]
    assert [int(sizes[pair].sum()) for pair in items.reshape(4, 2)] == [8, 8, 8, 8]


def test_an_item_of_the_size_of_a_row_fills_one() -> None:
    """This also holds for rows of 2^16 tokens, where the size needs 17 bits."""
    for length in (8, 2**16):
        items, counts = pack_by_best_fit(np.arange(3), np.array([2, length, length - 2]), length)
        assert items.tolist() == [1, 2, 0] and counts.tolist() == [1, 2]


def test_small_items_share_rows() -> None:
    """Items of one size open no more rows than they need."""
    _, counts = pack_by_best_fit(np.arange(10), np.full(10, 3), 8)
    assert counts.tolist() == [2, 2, 2, 2, 2]


def test_documents_of_one_size_are_shuffled() -> None:
    """With an order, chance decides which documents share a row; without one, they keep their order."""
    documents = np.arange(1, 100) ** 5  # beyond 32 bits
    sizes = np.where(np.arange(99) < 60, 5, 3)
    plain, counts = pack_by_best_fit(documents, sizes, 8)
    assert plain[::2][:39].tolist() == documents[:39].tolist() and counts[:39].tolist() == [2] * 39
    distinct_orders = {
        tuple(pack_by_best_fit(documents, sizes, 8, Permutation(seed, "a", 0, 99))[0].tolist()) for seed in (1, 1, 2)
    }
    assert len(distinct_orders) == 2 and all(sorted(order) == documents.tolist() for order in distinct_orders)
    for items in distinct_orders:
        assert abs(np.corrcoef(items[:78:2], np.arange(39))[0, 1]) < 0.5
