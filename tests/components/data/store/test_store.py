"""Reading a token store."""

import pickle
from pathlib import Path

import pytest

from drawloom.components.data.store.store import MappedFile, Store
from drawloom.graph import UserError
from support.stores import damage, store_of

PARTS = [["abc", "", "de"], [], ["f" * 300]]


def test_a_store_has_the_documents_of_all_shards(tmp_path: Path) -> None:
    """Documents count through the shards, each with its end; empty ones are dropped."""
    store = store_of(tmp_path / "store", PARTS)
    assert store.lengths.tolist() == [4, 3, 301] and store.token_count == 308
    assert store.read(1, 0, 9).ids.tolist() == [*b"de", 256] and store.read(2, 299, 400).ids.tolist() == [*b"f", 256]
    assert store.describe_origin(1) == "part 0:2" and store.describe_origin(2) == "part 2:0"
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


def test_opening_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a store reads no tokens, and reading a document verifies only its blocks, once."""
    store_of(tmp_path / "store", [["a" * 300_000, "b" * 300_000]])
    blocks: list[int] = []
    verify = MappedFile.verify_blocks

    def record(self: MappedFile, first: int, last: int) -> None:
        if self.path.suffix == ".tokens":
            blocks.extend(range(first, last))
        verify(self, first, last)

    monkeypatch.setattr(MappedFile, "verify_blocks", record)
    store = Store.open(tmp_path / "store")
    assert store.lengths.tolist() == [300_001, 300_001] and not blocks
    for _ in range(2):
        assert store.read(1, 0, 40_000).ids.tolist() == [*b"b" * 40_000]
        assert blocks == [9, 10]  # of 2^16 bytes, which are 2^15 tokens


@pytest.mark.parametrize("name", ["00000.tokens", "00000.documents", "00000.digests", "00000.json", "store.json"])
def test_a_changed_bit_is_never_read(tmp_path: Path, name: str) -> None:
    """A flipped bit anywhere in a file is an error naming this file, when the store is opened or read."""
    store_of(tmp_path / "store", [["abc", "de" * 60_000]])
    path = tmp_path / "store" / name
    content = path.read_bytes()
    for position in {0, 1, 9, len(content) // 3, len(content) // 2, len(content) - 2, len(content) - 1}:
        damage(path, position)
        with pytest.raises(UserError, match=f"{name} .*(other content|can't be read|has format)"):
            _read_all(tmp_path / "store")
        path.write_bytes(content)
    _read_all(tmp_path / "store")


def _read_all(folder: Path) -> None:
    store = Store.open(folder)
    assert len(store.document_hashes) == len(store.lengths)
    for document, length in enumerate(store.lengths.tolist()):
        store.read(document, 0, length)
        store.describe_origin(document)


def test_faults_names_every_file_that_changed(tmp_path: Path) -> None:
    """All damaged shards are listed at once, files of others, and a lock with content."""
    assert store_of(tmp_path / "store", PARTS).find_faults() == []
    damage(tmp_path / "store" / "00000.tokens")
    damage(tmp_path / "store" / "00001.json")
    (tmp_path / "store" / "00002.digests").unlink()
    (tmp_path / "store" / "lock").write_text("x")
    (tmp_path / "store" / "00003.tokens").write_text("x")
    faults = Store.open_unchecked(tmp_path / "store").find_faults()
    names = [fault.removeprefix(f"{tmp_path}/store/").split()[0] for fault in faults]
    assert names == ["00000.tokens", "00001.json", "00002.digests", "00003.tokens", "lock"]


def test_a_folder_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    """A missing store, a damaged index, another format and a damaged shard are errors naming the file."""
    with pytest.raises(UserError, match="not a complete token store"):
        Store.open(tmp_path)
    store_of(tmp_path / "store", PARTS)
    path = tmp_path / "store" / "store.json"
    metadata = path.read_text()
    for text, reason in (
        (metadata[:-9], "can't be read"),
        (metadata.replace('"format": 3', '"format": 7'), "format 7"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"store\.json .*{reason}"):
            Store.open(tmp_path / "store")
    path.write_text(metadata)
    (tmp_path / "store" / "00002.tokens").unlink()
    with pytest.raises(UserError, match=r"00002\.tokens is missing"):
        Store.open(tmp_path / "store")
