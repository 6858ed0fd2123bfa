"""Text file corpus, one document per file."""

from collections.abc import Iterator
from typing import Literal

from drawloom.components.data.sources.documents import Part, iterate_texts, wrap_parts_for_split
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.text import group_text_files
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component
class TextFiles:
    """
    Text files selected by globs, one document per file; `.gz` and `.zst` are decompressed.

    A document's split depends only on its text: files can be moved and added, and copies are never in both splits. If
    there are only a few files, their ends are validation data.
    """

    paths: list[str] = setting(
        globs=True,
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs for UTF-8 files, relative to the current directory; `**` crosses folders",
    )
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of files held out for evaluation; 0: none"
    )
    invalid_bytes: Literal["refuse", "replace"] = setting(
        default="refuse", doc="invalid UTF-8 in a file: refuse the file, or replace invalid bytes by U+FFFD"
    )

    def check_before_open(self) -> None:
        """Raise UserError for a glob without a file."""
        find_files(self.paths)

    def documents(self, split: Split) -> Iterator[str]:
        """Return a split's texts. Raises UserError for a glob without a file, or an unreadable file."""
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        parts = group_text_files(find_files(self.paths), self.invalid_bytes == "replace")
        return [*wrap_parts_for_split(parts, split, self.validation_fraction)]
