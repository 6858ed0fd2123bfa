"""Corpus of Parquet and Arrow files, one document per row."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, split_parts, texts_of
from drawloom.components.data.sources.files import find
from drawloom.components.data.sources.tables import table_parts
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component(needs={"pyarrow": "drawloom[arrow]"})
class Parquet:
    """
    Documents in a text column of Parquet and Arrow tables; the file extension selects the format.

    A document's split depends only on its text. If there are only a few documents, the end of each one is
    validation data.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of .parquet and .arrow files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="name of the text column")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the documents to hold out for evaluation; 0: none"
    )

    def check_machine(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a table without the column."""
        next(texts_of(table_parts(find(self.paths)[:1], self.field)), None)

    def documents(self, split: Split) -> Iterator[str]:
        """
        Return the texts of one split, ordered by file and row. Raises UserError with the row of a value that is
        not text.
        """
        return texts_of(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in parts that can be read independently."""
        return [*split_parts(table_parts(find(self.paths), self.field), split, self.validation_fraction)]
