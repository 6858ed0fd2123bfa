"""One shard of a token store."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from drawloom.components.data.store.store import ShardWriter, TokenShard, choose_id_dtype, get_shard_stem
from drawloom.graph import UserError
from support.stores import content, damage

DTYPE = np.dtype("<u2")
DOCUMENTS = [([1, 2, 65_535], "a.txt", 0), ([], "a.txt", 7), ([9], "b.txt", 2**40)]


def write(folder: Path) -> TokenShard:
    with ShardWriter(folder, 3, DTYPE) as shard:
        for ids, source, offset in DOCUMENTS:
            shard.append_document(np.array(ids, np.int64), source, offset)
    return TokenShard.open_from_json(get_shard_stem(folder, 3), DTYPE)


def test_documents_come_back(tmp_path: Path) -> None:
    """Ids, ends, offsets and sources are as they were added; equal ids have equal hashes, others different ones."""
    shard = write(tmp_path)
    ids = shard.map_file("tokens").read(shard.dtype, 0, shard.tokens)
    assert ids.tolist() == [1, 2, 65_535, 9] and shard.document_ends.tolist() == [3, 3, 4]
    assert [shard.describe_origin(number) for number in range(3)] == ["a.txt:0", "a.txt:7", f"b.txt:{2**40}"]
    assert len(set(shard.read_document_column("keys").tolist())) == 3
    other = tmp_path / "other"
    other.mkdir()
    assert write(other).read_document_column("keys").tolist() == shard.read_document_column("keys").tolist()
    shard.check_file_contents()


def test_the_files_are_as_documented(tmp_path: Path) -> None:
    """The bytes on disk are little-endian columns, which other programs can read."""
    write(tmp_path)
    files = content(tmp_path)
    assert sorted(files) == ["00003.digests", "00003.documents", "00003.json", "00003.tokens"]
    assert files["00003.tokens"] == b"\x01\0\x02\0\xff\xff\x09\0"
    assert np.frombuffer(files["00003.documents"], "<u8", 3).tolist() == [3, 3, 4]
    assert np.frombuffer(files["00003.documents"], "<u4", 3, 72).tolist() == [0, 0, 1]
    hashes = [hashlib.sha256(files[f"00003.{kind}"]).digest() for kind in ("tokens", "documents")]
    assert files["00003.digests"] == b"".join(hashes)


@pytest.mark.parametrize("kind", ["tokens", "documents"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    """A changed byte is found by reading, a cut-off or missing file at once; the error names the file."""
    shard = write(tmp_path)
    path = tmp_path / f"00003.{kind}"
    damage(path)
    shard.check_file_sizes()
    with pytest.raises(UserError, match=f"00003.{kind} has other content"):
        shard.check_file_contents()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"00003.{kind} has .* bytes instead of"):
        shard.check_file_sizes()
    path.unlink()
    with pytest.raises(UserError, match=f"00003.{kind} is missing"):
        shard.check_file_sizes()


def test_a_failure_leaves_no_complete_shard(tmp_path: Path) -> None:
    """An error while a shard is written leaves it without its JSON file, also if it had one before."""
    write(tmp_path)
    with pytest.raises(KeyError), ShardWriter(tmp_path, 3, DTYPE) as shard:
        shard.append_document(np.array([1]), "a", 0)
        raise KeyError
    assert not (tmp_path / "00003.json").exists()
    write(tmp_path).check_file_contents()


def test_an_empty_shard_is_complete(tmp_path: Path) -> None:
    """A part may have no document."""
    with ShardWriter(tmp_path, 0, DTYPE):
        pass
    shard = TokenShard.open_from_json(get_shard_stem(tmp_path, 0), DTYPE)
    shard.check_file_contents()
    ids = shard.map_file("tokens").read(shard.dtype, 0, shard.tokens)
    assert ids.tolist() == shard.document_ends.tolist() == []


@pytest.mark.parametrize(("size", "width"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_ids_have_the_least_width(size: int, width: int) -> None:
    """Two bytes up to 65,536 ids, else four."""
    assert np.dtype(choose_id_dtype(size)).itemsize == width
