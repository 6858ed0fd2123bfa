"""Parquet and Arrow corpus, one document per row."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, split_parts, texts_of
from drawloom.components.data.sources.files import find
from drawloom.components.data.sources.tables import table_parts
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
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs for .parquet and .arrow files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="text column's name")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of documents held out for evaluation; 0: none"
    )

    def check_machine(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a table without the column."""
        next(texts_of(table_parts(find(self.paths)[:1], self.field)), None)

    def documents(self, split: Split) -> Iterator[str]:
        """
        Return a split's texts, ordered by file and row. Raises UserError with the row for a value other than
        text.
        """
        return texts_of(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        return [*split_parts(table_parts(find(self.paths), self.field), split, self.validation_fraction)]
