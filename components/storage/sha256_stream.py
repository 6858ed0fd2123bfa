"""SHA-256 of a stream of bytes, computed in a thread while the stream is read or written."""

import hashlib
import queue
import threading

import attrs

LARGE = 2**18  # bytes; hashing a smaller piece takes less time than starting a thread
AHEAD = 4  # queued pieces; more would only hold memory, since hashing is about as fast as the disk


@attrs.frozen
class Content:
    """Identifies what a file holds: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class Sha256Stream:
    """
    Hashes pieces in order; from the first large piece on in a thread, while the disk is busy.

    A piece must not change before `finish`, which also ends the thread. `size` is the number of bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(AHEAD)
        self._thread: threading.Thread | None = None

    def update(self, piece: memoryview) -> None:
        """Append a piece."""
        self.size += len(piece)
        if self._thread is None and len(piece) >= LARGE:
            self._thread = threading.Thread(target=self._work, name="sha256", daemon=True)
            self._thread.start()
        if self._thread is None:
            self._hash.update(piece)
        else:
            self._pieces.put(piece)

    def finish(self) -> Content:
        """Size and hash of all pieces."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        return Content(self.size, self._hash.hexdigest())

    def _work(self) -> None:
        for piece in iter(self._pieces.get, None):
            self._hash.update(piece)
