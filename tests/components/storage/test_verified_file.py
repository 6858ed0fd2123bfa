"""Parts of files, verified block by block."""

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import BLOCK, FileDigest
from drawloom.components.storage.verified_file import ContentMismatchError, open_file_to_verify

SIZE = 3 * BLOCK + 1000
DATA = random.Random(1).randbytes(SIZE)


def hash_file(path: Path) -> FileDigest:
    """Return a file's size and the SHA-256 of its blocks."""
    content = path.read_bytes()
    starts = range(0, max(1, len(content)), BLOCK)
    return FileDigest(len(content), [hashlib.sha256(content[start : start + BLOCK]).hexdigest() for start in starts])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with four blocks, the last one short."""
    path = tmp_path_factory.mktemp("verified") / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Record the reads' offsets and lengths."""
    ranges: list[tuple[int, int]] = []
    preadv = os.preadv

    def record_and_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        ranges.append((offset, count))
        return count

    monkeypatch.setattr(durable_files.os, "preadv", record_and_read)  # type: ignore[attr-defined]
    yield ranges


@pytest.mark.parametrize(
    ("offset", "length", "blocks"),
    [
        (0, SIZE, {0, 1, 2, 3}),
        (5, 0, set()),
        (5, 10, {0}),
        (BLOCK - 1, 2, {0, 1}),
        (BLOCK, BLOCK, {1}),
        (BLOCK - 1, BLOCK + 2, {0, 1, 2}),
        (3 * BLOCK, 1000, {3}),
    ],
)
def test_a_part_is_read_with_its_blocks_alone(
    path: Path, reads: list[tuple[int, int]], offset: int, length: int, blocks: set[int]
) -> None:
    """The bytes equal the file's; only the blocks around them are read, once, and verified."""
    expected = hash_file(path)
    reads.clear()
    with open_file_to_verify(path, expected) as file:
        assert file.read(offset, length) == DATA[offset : offset + length]
        assert file.verified == blocks
    assert sorted(reads) == [(number * BLOCK, min(BLOCK, SIZE - number * BLOCK)) for number in sorted(blocks)]


def test_a_block_read_in_order_is_read_once(path: Path, reads: list[tuple[int, int]]) -> None:
    """Consecutive parts in one block share its single read."""
    expected = hash_file(path)
    reads.clear()
    with open_file_to_verify(path, expected) as file:
        step = BLOCK // 3
        parts = [file.read(start, min(step, SIZE - start)) for start in range(0, SIZE, step)]
    assert b"".join(parts) == DATA and sum(count for _, count in reads) == SIZE


@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_changed_block_is_refused_only_where_it_is_read(tmp_path: Path, path: Path, block: int) -> None:
    """A flipped bit raises, with the bytes, before its block is used, whole or in part; other blocks can be read."""
    data = bytearray(DATA)
    data[block * BLOCK + 17] ^= 1
    (tmp_path / "file").write_bytes(data)
    end = min((block + 1) * BLOCK, SIZE)
    with open_file_to_verify(tmp_path / "file", hash_file(path)) as file:
        for offset, length in ((block * BLOCK, end - block * BLOCK), (block * BLOCK + 1, 5)):
            with pytest.raises(ContentMismatchError, match=f"checksum mismatch in bytes {block * BLOCK} to {end}"):
                file.read(offset, length)
        with pytest.raises(ContentMismatchError):
            file.verify(range(4))
        file.verify({0, 1, 2, 3} - {block})
        assert file.read(2 * BLOCK, BLOCK) == DATA[2 * BLOCK : 3 * BLOCK] and block not in file.verified


def test_a_file_of_another_size_is_refused(tmp_path: Path, path: Path) -> None:
    """A file that was cut or appended to does not even open."""
    for data in (DATA[:-1], DATA + b"x"):
        (tmp_path / "file").write_bytes(data)
        with (
            pytest.raises(ContentMismatchError, match=f"has {len(data)} bytes instead of {SIZE}"),
            open_file_to_verify(tmp_path / "file", hash_file(path)),
        ):
            pytest.fail("it must not open")


def test_an_empty_file_has_an_empty_block(tmp_path: Path) -> None:
    """It can be verified like any other."""
    (tmp_path / "file").write_bytes(b"")
    with open_file_to_verify(tmp_path / "file", hash_file(tmp_path / "file")) as file:
        assert file.read(0, 0) == b""
        file.verify([0])
        assert file.verified == {0}
