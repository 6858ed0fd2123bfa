"""Append-only files in a run folder."""

import logging
import os
from pathlib import Path

import attrs

from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import CHUNK, open_to_append

log = logging.getLogger("drawloom.storage")


@attrs.define(eq=False)
class AppendedFile:
    """Open file; if somebody removes it or its folder, the next append rewrites it, with a warning."""

    path: Path
    _descriptor: int

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """Open a file, and create it if it is missing. Raises UserError if it is a link or not a regular file."""
        return cls(path, open_to_append(path))

    def append_what_fits(self, data: bytes) -> int:
        """Append data, and return the number of bytes written, which may be fewer on a nearly full disk."""
        self._restore_if_removed()
        return os.write(self._descriptor, data)

    def read(self) -> bytes:
        """Return the whole content, even if the file was removed."""
        pieces, size = list[bytes](), 0
        while piece := os.pread(self._descriptor, CHUNK, size):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    def replace(self, content: bytes) -> None:
        """
        Replace the content atomically. If the file starts with the new content, truncate it, which works on a
        full disk.
        """
        if self.read().startswith(content):
            os.ftruncate(self._descriptor, len(content))
        else:
            replace_file(self.path, content)
            self._reopen_file()

    def sync(self) -> None:
        """Flush to disk. A write alone survives a killed process, but not a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _restore_if_removed(self) -> None:
        """Rewrite a removed file, whose content is still readable through the open descriptor."""
        if self._is_at_path():
            return
        if not os.path.lexists(self.path):  # otherwise an editor has replaced the file
            if self.path.parent.parent.is_dir():
                self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, self.read())
            log.warning("%s was removed during the run, and is written anew", self.path)
        self._reopen_file()

    def _is_at_path(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _reopen_file(self) -> None:
        """Open the file that is now at the path, and close the old descriptor."""
        old_descriptor, self._descriptor = self._descriptor, open_to_append(self.path)
        os.close(old_descriptor)
