"""Text file corpus, one document per file."""

from collections.abc import Sequence
from typing import Literal

from drawloom import component, setting
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File, FileCorpus, group_text_files


@component
class TextFiles(FileCorpus):
    """UTF-8 files selected by globs, one document per file; `.gz` and `.zst` are decompressed."""

    invalid_bytes: Literal["refuse", "replace"] = setting(
        "invalid UTF-8 in a file: refuse the file, or replace invalid bytes by U+FFFD", default="refuse"
    )

    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        return group_text_files(files, self.invalid_bytes == "replace")
