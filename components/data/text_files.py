"""Text file corpus, one document per file."""

from collections.abc import Iterator, Sequence
from typing import Literal

from drawloom import NodeView, Problem, component, setting
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File, FileCorpus, group_text_files


@component
class TextFiles(FileCorpus):
    """UTF-8 files selected by globs, one document per file; `.gz` and `.zst` are decompressed."""

    invalid_bytes: Literal["refuse", "replace"] = setting(
        "invalid UTF-8 in a file: refuse the file, or replace invalid bytes by U+FFFD", default="refuse"
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warn of JSON lines, which would be trained with their JSON."""
        for path in node.settings["paths"]:
            if ".jsonl" in path:
                yield node.warning("paths", f"{path} is read as plain text, JSON included", 'write use = "data.jsonl"')

    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        return group_text_files(files, self.invalid_bytes == "replace")
