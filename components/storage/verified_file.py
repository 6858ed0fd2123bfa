"""Files with known block digests: a part is verified by reading only its blocks."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs

from drawloom.components.storage.durable_files import BLOCK, FileDigest, RegularFile, hash_block, open_regular_file

HASH_THREADS = 4  # threads that hash the blocks of one read


class ContentMismatchError(Exception):
    """Difference between a file and its original content; the message has the difference, not the file."""


@attrs.define(eq=False)
class VerifiedFile(RegularFile):
    """
    Open file with bytes verified before use; `verified` has the blocks verified so far.

    Reads raise ContentMismatchError. The bytes in use are the hashed bytes themselves, and sequential reads read
    every byte once.
    """

    expected: FileDigest = attrs.field(kw_only=True)
    verified: set[int] = attrs.field(kw_only=True, factory=set)
    _last: tuple[int, bytes] = (-1, b"")  # number and content of the last block that was needed in part

    def read_into(self, buffer: memoryview, offset: int) -> None:
        end = offset + len(buffer)
        if end == offset:
            return
        with ThreadPoolExecutor(HASH_THREADS, "sha256") as pool:  # starts threads lazily
            checks = []
            for number in range(offset // BLOCK, -(-end // BLOCK)):
                start, stop = self._block_range(number)
                low, high = max(start, offset), min(stop, end)
                part = buffer[low - offset : high - offset]
                if (low, high) != (start, stop) or number == self._last[0]:
                    part[:] = self._read_block(number)[low - start : high - start]
                else:
                    super().read_into(part, start)
                    checks.append(pool.submit(self._verify_block, number, part))
        for check in checks:
            check.result()

    def verify(self, blocks: Iterable[int]) -> None:
        """Read and verify these blocks."""
        for number in blocks:
            start, stop = self._block_range(number)
            self._verify_block(number, self._read_unverified(start, stop))

    def _read_block(self, number: int) -> bytes:
        """Return a verified block; caches the last one."""
        if number != self._last[0]:
            start, stop = self._block_range(number)
            block = self._read_unverified(start, stop)
            self._verify_block(number, block)
            self._last = number, block
        return self._last[1]

    def _read_unverified(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to before `stop`."""
        buffer = bytearray(stop - start)
        super().read_into(memoryview(buffer), start)
        return bytes(buffer)

    def _block_range(self, number: int) -> tuple[int, int]:
        """Return a block's first byte and its end."""
        return number * BLOCK, min((number + 1) * BLOCK, self.size)

    def _verify_block(self, number: int, block: bytes | memoryview) -> None:
        """Raise ContentMismatchError if a block's digest differs."""
        if number >= len(self.expected.blocks) or hash_block(block) != self.expected.blocks[number]:
            start, stop = self._block_range(number)
            raise ContentMismatchError(f"has a checksum mismatch in bytes {start} to {stop}")
        self.verified.add(number)


@contextmanager
def open_file_to_verify(path: Path, expected: FileDigest) -> Iterator[VerifiedFile]:
    """
    Open a file with this content. Raises OSError as `open_regular_file`, and ContentMismatchError for another size.
    """
    with open_regular_file(path) as file:
        if file.size != expected.size:
            raise ContentMismatchError(f"has {file.size} bytes instead of {expected.size}")
        yield VerifiedFile(file.path, file.descriptor, file.identity, expected=expected)
