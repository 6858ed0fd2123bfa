"""SHA-256 of bytes on their way, computed beside whoever reads or writes them."""

import hashlib
import queue
import threading
from types import TracebackType

LARGE = 2**18  # bytes of a piece for which it is worth while to start a thread
AHEAD = 4  # pieces that may wait to be digested


class Sha256Stream:
    """
    Takes pieces in order; from the first large one on a thread of its own digests them, while the disk is busy.

    A piece must stay as it is until `hex` has been called, or the block has ended.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(AHEAD)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Sha256Stream":
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._finish()

    def update(self, piece: memoryview) -> None:
        """Take the next piece."""
        if self._thread is None and len(piece) >= LARGE:
            self._thread = threading.Thread(target=self._work, name="digest", daemon=True)
            self._thread.start()
        if self._thread is None:
            self._hash.update(piece)
        else:
            self._pieces.put(piece)

    def hex(self) -> str:
        """The digest of all that was taken."""
        self._finish()
        return self._hash.hexdigest()

    def _finish(self) -> None:
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        for piece in iter(self._pieces.get, None):
            self._hash.update(piece)
