"""Reading a token store."""

import pickle
from pathlib import Path

import pytest

from drawloom.components.data.store.store import Store
from drawloom.graph import UserError
from support.stores import store_of

PARTS = [["abc", "", "de"], [], ["f" * 300]]


def test_documents_are_those_of_all_shards(tmp_path: Path) -> None:
    """Documents count through the shards, each with its end; empty ones are dropped."""
    store = store_of(tmp_path / "store", PARTS)
    assert store.lengths.tolist() == [4, 3, 301] and store.token_count == 308
    assert store.read(1, 0, 9).ids.tolist() == [*b"de", 256] and store.read(2, 299, 400).ids.tolist() == [*b"f", 256]
    assert store.source(1) == "part 0:2" and store.source(2) == "part 2:0"
    assert store.read(0, 0, 4).weights is None
    assert (store.vocab_size, store.eos_id) == (257, 256)


def test_the_fingerprint_is_of_the_documents(tmp_path: Path) -> None:
    """The same documents in other shards have the same fingerprint; another letter or order has another."""
    fingerprints = [
        store_of(tmp_path / str(number), parts).fingerprint
        for number, parts in enumerate([[["ab", "c"]], [["ab"], ["c"]], [["ab", "d"]], [["c", "ab"]], [["a", "bc"]]])
    ]
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 4


def test_a_pickled_store_has_no_tokens(tmp_path: Path) -> None:
    """A worker process gets the paths, not the content, and reads the same."""
    store = store_of(tmp_path / "store", [["x" * 50_000]])
    store.read(0, 0, 9)
    dumped = pickle.dumps(store)
    assert len(dumped) < 2_000
    assert pickle.loads(dumped).read(0, 49_998, 50_001).ids.tolist() == [*b"xx", 256]


def test_opening_reads_no_tokens(tmp_path: Path) -> None:
    """A store of 2^30 tokens, of which the disk holds none, is opened, and its last ones are read."""
    store = store_of(tmp_path / "store", [["ab"]])
    path = tmp_path / "store" / "store.json"
    path.write_text(path.read_text().replace('"shards": [[1, 3]]', f'"shards": [[1, {2**30}]]'))
    with (tmp_path / "store" / "00000.tokens").open("r+b") as file:
        file.truncate(2**31)
    with (tmp_path / "store" / "00000.documents").open("r+b") as file:
        file.write((2**30).to_bytes(8, "little"))
    store = Store.open(tmp_path / "store")
    assert store.token_count == 2**30 and store.read(0, 2**30 - 2, 2**30).ids.tolist() == [0, 0]


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    """A folder without a store, a damaged index, another format and a damaged shard are errors that name the file."""
    with pytest.raises(UserError, match="no complete token store"):
        Store.open(tmp_path)
    store_of(tmp_path / "store", PARTS)
    path = tmp_path / "store" / "store.json"
    held = path.read_text()
    for text, reason in ((held[:-9], "can't be read"), (held.replace('"format": 1', '"format": 7'), "format 7")):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"store\.json .*{reason}"):
            Store.open(tmp_path / "store")
    path.write_text(held)
    (tmp_path / "store" / "00002.tokens").unlink()
    with pytest.raises(UserError, match=r"00002\.tokens is missing"):
        Store.open(tmp_path / "store")
