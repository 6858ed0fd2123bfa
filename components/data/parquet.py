"""Parquet and Arrow corpus, one document per row."""

from collections.abc import Sequence

from drawloom import component, setting
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File, FileCorpus
from drawloom.components.data.sources.formats import split_table_files


@component(needs={"pyarrow": "drawloom[arrow]"})
class Parquet(FileCorpus):
    """
    Documents in a text column in Parquet (.parquet) and Arrow (.arrow) tables; the extension selects the format.
    """

    field: str = setting("text column's name", default="text")

    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        return split_table_files(files, self.field)
