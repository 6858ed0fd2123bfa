"""Reads parts of a file whose content is known by the digests of its blocks: only the blocks in which they are."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs

from drawloom.components.storage.regular_file import RegularFile, regular_file
from drawloom.components.storage.sha256_stream import BLOCK, Content, hash_block

HASHERS = 4  # threads that hash the blocks of one read


class OtherContent(Exception):
    """A file differs from what was written; the message says how, and does not name the file."""


@attrs.define(eq=False)
class VerifiedFile(RegularFile):
    """
    An open file of which every byte that is read is verified first; `verified` are the blocks that were.

    Reads raise OtherContent. The bytes in use are those that were hashed, and what is read in order is read once.
    """

    expected: Content = attrs.field(kw_only=True)
    verified: set[int] = attrs.field(kw_only=True, factory=set)
    _last: tuple[int, bytes] = (-1, b"")  # of the blocks that were needed in part, the last one

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from an offset on."""
        end = offset + len(buffer)
        if end == offset:
            return
        with ThreadPoolExecutor(HASHERS, "sha256") as pool:  # starts a thread when it is given work
            checks = []
            for number in range(offset // BLOCK, -(-end // BLOCK)):
                start, stop = self._span(number)
                low, high = max(start, offset), min(stop, end)
                part = buffer[low - offset : high - offset]
                if (low, high) != (start, stop) or number == self._last[0]:
                    part[:] = self._block(number)[low - start : high - start]
                else:
                    super().read_into(part, start)
                    checks.append(pool.submit(self._verify, number, part))
        for check in checks:
            check.result()

    def verify(self, blocks: Iterable[int]) -> None:
        """Read and verify these blocks."""
        for number in blocks:
            start, stop = self._span(number)
            self._verify(number, self._plain(start, stop))

    def _block(self, number: int) -> bytes:
        if number != self._last[0]:
            block = self._plain(*self._span(number))
            self._verify(number, block)
            self._last = number, block
        return self._last[1]

    def _plain(self, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        super().read_into(memoryview(buffer), start)
        return bytes(buffer)

    def _span(self, number: int) -> tuple[int, int]:
        return number * BLOCK, min((number + 1) * BLOCK, self.size)

    def _verify(self, number: int, block: bytes | memoryview) -> None:
        if number >= len(self.expected.blocks) or hash_block(block) != self.expected.blocks[number]:
            start, stop = self._span(number)
            raise OtherContent(f"has a checksum mismatch in bytes {start} to {stop}")
        self.verified.add(number)


@contextmanager
def verified_file(path: Path, expected: Content) -> Iterator[VerifiedFile]:
    """A file of this content, open for reading. OSError as of `regular_file`; OtherContent for one of another size."""
    with regular_file(path) as file:
        if file.size != expected.size:
            raise OtherContent(f"has {file.size} bytes instead of {expected.size}")
        yield VerifiedFile(file.path, file.descriptor, file.identity, expected=expected)
