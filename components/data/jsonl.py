"""JSON-lines corpus, one document per line."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, iterate_texts, wrap_parts_for_split
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.json_lines import split_json_lines_files
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component
class JsonLines:
    """
    Documents in JSON-lines files: one object per line with a text field; `.gz` and `.zst` are decompressed.

    A document's split depends only on its text: lines can be moved and added, and duplicates are never in both
    splits. If there are only a few documents, their ends are validation data.
    """

    paths: list[str] = setting(
        globs=True,
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs for UTF-8 files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="text field's name")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of documents held out for evaluation; 0: none"
    )

    def check_before_open(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or for a malformed line."""
        next(iterate_texts(split_json_lines_files(find_files(self.paths)[:1], self.field)), None)

    def documents(self, split: Split) -> Iterator[str]:
        """Return a split's texts, ordered by file and line. Raises UserError with a bad line's position."""
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        return [
            *wrap_parts_for_split(
                split_json_lines_files(find_files(self.paths), self.field), split, self.validation_fraction
            )
        ]
