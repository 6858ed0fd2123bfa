"""
Block-wise SHA-256 for a byte stream, computed in a thread while the stream is written.

Digests are per block instead of per file, so a part can be read and verified alone.
"""

import hashlib
import queue
import threading
from typing import Any

import attrs

BLOCK = 2**22  # bytes; part of the format of checkpoints
LARGE = 2**18  # bytes; hashing a smaller piece takes less time than starting a thread
AHEAD = 4  # queued pieces; more would only use memory, because hashing is about as fast as the disk


@attrs.frozen
class FileDigest:
    """Identity of a file's content: its size in bytes, and the hexadecimal SHA-256 per block."""

    size: int
    blocks: tuple[str, ...] = attrs.field(converter=tuple[str, ...])

    @property
    def digest(self) -> str:
        """Digest for the whole file: the SHA-256 over its block digests."""
        return hashlib.sha256(b"".join(map(bytes.fromhex, self.blocks))).hexdigest()


def count_hash_blocks(size: int) -> int:
    """Return the block count for a file with `size` bytes; an empty file has one empty block."""
    return max(1, -(-size // BLOCK))


def hash_block(block: bytes | memoryview) -> str:
    """Return a block's hexadecimal SHA-256."""
    return hashlib.sha256(block).hexdigest()


@attrs.define(eq=False)
class Sha256Stream:
    """
    Incremental hash; a thread starts at the first large piece, to hash while the disk is busy.

    A piece must not change before `finish`, which also ends the thread. `size` is the byte count so far.
    """

    _block: int = BLOCK  # bytes
    size: int = 0
    _blocks: list[str] = attrs.field(factory=list)
    _hash: Any = attrs.field(factory=hashlib.sha256)  # of the last block
    _hashed: int = 0  # bytes in it
    _pieces: queue.Queue[memoryview | None] = attrs.field(factory=lambda: queue.Queue(AHEAD))
    _thread: threading.Thread | None = None

    def update(self, piece: memoryview) -> None:
        """Append a piece; the thread may hash it later."""
        self.size += len(piece)
        if self._thread is None and len(piece) >= LARGE:
            self._thread = threading.Thread(target=self._hash_queue, name="sha256", daemon=True)
            self._thread.start()
        if self._thread is None:
            self._hash_piece(piece)
        else:
            self._pieces.put(piece)

    def finish(self) -> FileDigest:
        """Return the size and digests of all pieces."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        if self._hashed or not self._blocks:
            self._end_block()
        return FileDigest(self.size, self._blocks)

    def _hash_queue(self) -> None:
        """Hash the queued pieces, in the thread, until None arrives."""
        for piece in iter(self._pieces.get, None):
            self._hash_piece(piece)

    def _hash_piece(self, piece: memoryview) -> None:
        """Hash a piece, and end every full block."""
        while piece:
            part, piece = piece[: self._block - self._hashed], piece[self._block - self._hashed :]
            self._hash.update(part)
            self._hashed += len(part)
            if self._hashed == self._block:
                self._end_block()

    def _end_block(self) -> None:
        """Store the block's digest, and begin the next block."""
        self._blocks.append(self._hash.hexdigest())
        self._hash, self._hashed = hashlib.sha256(), 0
