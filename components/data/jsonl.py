"""JSON-lines corpus, one document per line."""

from collections.abc import Sequence

from drawloom import component, setting
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File, FileCorpus
from drawloom.components.data.sources.formats import split_json_lines_files


@component
class JsonLines(FileCorpus):
    """
    Documents in JSON-lines files: one object per line with a text field; `.gz` and `.zst` are decompressed.
    """

    field: str = setting("text field's name", default="text")

    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        return split_json_lines_files(files, self.field)
