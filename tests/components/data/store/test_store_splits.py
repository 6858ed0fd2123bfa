"""The splits of a store."""

from pathlib import Path

from drawloom.components.data.store.store import select_split_documents
from support.stores import store_of


def test_each_document_is_in_one_split(tmp_path: Path) -> None:
    """The splits are disjoint and complete, about as large as asked, and equal documents are in one."""
    texts = [f"text {number % 50}" for number in range(100)]
    store = store_of(tmp_path / "store", [texts])
    train, validation = (
        select_split_documents(store, store.document_hashes, split, 0.3) for split in ("train", "validation")
    )
    chosen = [sorted(part.chosen.tolist()) for part in (train, validation)]
    assert sorted(chosen[0] + chosen[1]) == list(range(100)) and 10 < len(chosen[1]) < 50
    assert {number % 50 for number in chosen[0]}.isdisjoint(number % 50 for number in chosen[1])
    assert [train.describe_origin(0), train.read(0, 0, 4).ids.tolist()] == [f"part 0:{chosen[0][0]}", [*b"text"]]
    assert train.lengths.tolist() == store.lengths[chosen[0]].tolist() and train.read(0, 0, 1).weights is None
    assert len({train.fingerprint, validation.fingerprint, store.fingerprint}) == 3


def test_without_a_fraction_all_is_for_training(tmp_path: Path) -> None:
    """A fraction of 0 holds nothing out."""
    store = store_of(tmp_path / "store", [["a", "b"]])
    counts = [
        len(select_split_documents(store, store.document_hashes, split, 0.0).lengths)
        for split in ("train", "validation")
    ]
    assert counts == [2, 0]
