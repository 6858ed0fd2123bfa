"""Files of a run folder that are appended to while the run goes on."""

import logging
import os
from pathlib import Path

import attrs

from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import CHUNK, open_to_append

log = logging.getLogger("drawloom.storage")


@attrs.define(eq=False)
class AppendedFile:
    """An open file that is written anew, with a warning, if somebody removes it or its folder."""

    path: Path
    _descriptor: int

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """Open a file, which is created if it is missing. Raises UserError if it is a link or not a regular file."""
        return cls(path, open_to_append(path))

    def append(self, data: bytes) -> int:
        """Return how many of the bytes the disk has accepted, which may be a part if it is nearly full."""
        self._restore_if_removed()
        return os.write(self._descriptor, data)

    def read(self) -> bytes:
        """Return the whole content, also of a file that was removed."""
        pieces, size = list[bytes](), 0
        while piece := os.pread(self._descriptor, CHUNK, size):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    def replace(self, content: bytes) -> None:
        """Replace the content atomically; if the file begins with it, cut off the rest, which works on a full disk."""
        if self.read().startswith(content):
            os.ftruncate(self._descriptor, len(content))
        else:
            replace_file(self.path, content)
            self._reopen()

    def sync(self) -> None:
        """Return when everything written is on disk: write(2) alone survives a kill, but no power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _restore_if_removed(self) -> None:
        """Write the file anew if it was removed: its content is still readable through the open descriptor."""
        if self._has_name():
            return
        if not os.path.lexists(self.path):  # if not, an editor has replaced it
            if self.path.parent.parent.is_dir():
                self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, self.read())
            log.warning("%s was removed during the run, and is written anew", self.path)
        self._reopen()

    def _has_name(self) -> bool:
        """Whether the path is that of the open file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        before, self._descriptor = self._descriptor, open_to_append(self.path)
        os.close(before)
