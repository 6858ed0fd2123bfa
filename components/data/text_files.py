"""A corpus of text files, one document each."""

from collections.abc import Iterator
from typing import Literal

from drawloom.components.data import files
from drawloom.components.ports.data import Split
from drawloom.graph import between, component, setting


@component
class TextFiles:
    """
    Text files by glob, one document each.

    Whether a file is held out depends on its name below the glob's first wildcard alone: neither other files, nor the
    folder that the corpus lies in, move it to the other split.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "it names no file",
        doc="globs of UTF-8 files, relative to the current directory; `**` crosses folders",
    )
    validation_fraction: float = setting(default=0.05, check=between(0, 1), doc="share of the files that is held out")
    invalid_bytes: Literal["refuse", "replace"] = setting(
        default="refuse", doc="what to do with a file that is not UTF-8: stop, or put U+FFFD in place of its bad bytes"
    )

    def documents(self, split: Split) -> Iterator[str]:
        """The texts of one split. A glob without a file, or a file that can't be read, is a UserError."""
        return files.documents(files.find(self.paths), split, self.validation_fraction, self.invalid_bytes == "replace")
