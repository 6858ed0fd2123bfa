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

    The split of a file depends only on its name below the glob's first wildcard: neither other files nor the corpus's
    location move it to the other split. Of a few files, or a single one, the end of each is validation data.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of UTF-8 files, relative to the current directory; `**` crosses folders",
    )
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the files to hold out for evaluation; 0: none"
    )
    invalid_bytes: Literal["refuse", "replace"] = setting(
        default="refuse", doc="a file that is not UTF-8: stop, or replace its invalid bytes by U+FFFD"
    )

    def documents(self, split: Split) -> Iterator[str]:
        """The texts of one split. Raises UserError for a glob without a file, or a file that can't be read."""
        # A generator, so that an error has this node in its traceback, and not only the one that reads from it.
        found, replace = files.find(self.paths), self.invalid_bytes == "replace"
        yield from files.documents(found, split, self.validation_fraction, replace)
