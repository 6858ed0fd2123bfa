"""Parquet and Arrow corpus, one document per row."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, iterate_texts, wrap_parts_for_split
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.tables import split_table_files
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component(needs={"pyarrow": "drawloom[arrow]"})
class Parquet:
    """
    Documents in a text column in Parquet and Arrow tables; the file extension selects the format.

    A document's split depends only on its text. If there are only a few documents, their ends are
    validation data.
    """

    paths: list[str] = setting(
        globs=True,
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs for .parquet and .arrow files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="text column's name")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of documents held out for evaluation; 0: none"
    )

    def check_before_open(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a table without the column."""
        next(iterate_texts(split_table_files(find_files(self.paths)[:1], self.field)), None)

    def documents(self, split: Split) -> Iterator[str]:
        """
        Return a split's texts, ordered by file and row. Raises UserError with the row for a value other than
        text.
        """
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        return [
            *wrap_parts_for_split(
                split_table_files(find_files(self.paths), self.field), split, self.validation_fraction
            )
        ]
