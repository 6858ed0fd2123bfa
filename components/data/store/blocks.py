"""A shard's memory-mapped files; every block is verified when a process first reads it."""

import hashlib
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.storage.regular_file import read_file
from drawloom.graph import UserError

BLOCK = 2**16  # bytes; part of the format; small, because shuffled documents are read one by one
MAX_SIZE = 2**32  # bytes of a JSON file or of the digests of a shard
DIGEST = hashlib.sha256().digest_size


def count_blocks(byte_count: int) -> int:
    """Return the block count for a file with `byte_count` bytes."""
    return -(-byte_count // BLOCK)


@attrs.frozen(eq=False)
class MappedFile:
    """
    Memory-mapped file with known digests.

    content: uint8 (bytes,). digests: concatenated SHA-256 over all blocks. `verified` has 1 for blocks verified by
    this process.
    """

    path: Path
    content: np.ndarray
    digests: memoryview
    verified: bytearray

    @classmethod
    def open(cls, path: Path, size: int, digests: memoryview) -> "MappedFile":
        """Map a file with `size` bytes without reading it."""
        # an empty file can't be mapped; a plain array is sliced in less time than a memmap
        content = np.asarray(np.memmap(path, np.uint8, "r", 0, (size,))) if size else np.empty(0, np.uint8)
        return cls(path, content, digests, bytearray(count_blocks(size)))

    def read(self, dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray:
        """Return a view on `count` numbers from a byte offset. Raises UserError if one of their blocks has changed."""
        end = offset + count * dtype.itemsize
        first, last = offset // BLOCK, count_blocks(end)
        if self.verified.find(0, first, last) >= 0:
            self.verify_blocks(first, last)
        return self.content[offset:end].view(dtype)

    def verify_blocks(self, first_block: int, end_block: int) -> None:
        """Hash the unverified blocks from `first_block` to before `end_block`. Raises UserError if one has changed."""
        for number in range(first_block, end_block):
            if not self.verified[number]:
                block = self.content[number * BLOCK : (number + 1) * BLOCK]
                digest = self.digests[number * DIGEST : (number + 1) * DIGEST]
                if hashlib.sha256(block.data).digest() != digest:
                    end = number * BLOCK + len(block)
                    raise UserError(
                        f"{self.path} has other content than was written, in bytes {number * BLOCK} to {end}: the "
                        f"token store is damaged; restore the file, or remove {self.path.parent} and make it anew"
                    )
                self.verified[number] = 1

    def verify_all_blocks(self) -> None:
        """Hash all unverified blocks."""
        self.verify_blocks(0, len(self.verified))


def read_file_following_link(path: Path) -> bytes:
    """Return a regular file's content, following a link. Raises OSError for a pipe or a device."""
    return read_file(path.resolve(), MAX_SIZE)
