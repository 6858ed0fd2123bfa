"""A corpus of Parquet and Arrow files, one document per row."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, split_parts, texts_of
from drawloom.components.data.sources.files import find
from drawloom.components.data.sources.tables import table_parts
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component(needs={"pyarrow": "drawloom[arrow]"})
class Parquet:
    """
    Documents in tables, with their text in one column: Parquet, and Arrow files and streams by the end of their name.

    The split of a document depends only on its text. Of a few documents, the end of each is validation data.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of .parquet and .arrow files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="the column with the text")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the documents to hold out for evaluation; 0: none"
    )

    def check_machine(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a table without the column."""
        next(texts_of(table_parts(find(self.paths)[:1], self.field)), None)

    def documents(self, split: Split) -> Iterator[str]:
        """The texts of one split, in the order of files and rows. Raises UserError with the row of what is no text."""
        return texts_of(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """The same documents in parts that can be read independently."""
        return [*split_parts(table_parts(find(self.paths), self.field), split, self.validation_fraction)]
