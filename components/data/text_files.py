"""Text file corpus, one document per file."""

import logging
from collections.abc import Sequence
from typing import Literal

from drawloom import component, setting
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File, FileCorpus, find_files, group_text_files

log = logging.getLogger("drawloom.data")


@component
class TextFiles(FileCorpus):
    """UTF-8 files selected by globs, one document per file; `.gz` and `.zst` are decompressed."""

    invalid_bytes: Literal["refuse", "replace"] = setting(
        "invalid UTF-8 in a file: refuse the file, or replace invalid bytes by U+FFFD", default="refuse"
    )

    def check_before_open(self) -> None:
        """Read the first document, and warn of JSON lines, which would be trained with their JSON."""
        super().check_before_open()
        if lines := [file.path for file in find_files(self.paths) if file.suffix in (".jsonl", ".ndjson")]:
            log.warning('%s is read as plain text, JSON included; write use = "data.jsonl"', lines[0])

    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        return group_text_files(files, self.invalid_bytes == "replace")
