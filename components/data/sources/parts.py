"""File parts; file extensions determine formats."""

from collections.abc import Sequence
from itertools import groupby

from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File
from drawloom.components.data.sources.json_lines import split_json_lines_files
from drawloom.components.data.sources.tables import ArrowPart, split_parquet_files
from drawloom.components.data.sources.text import group_text_files

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def split_files_into_parts(files: Sequence[File], field: str) -> list[Part]:
    """Divide files into parts, in order; a file with an unknown extension is a text."""
    parts: list[Part] = []
    for kind, group in groupby(files, key=lambda file: FORMATS.get(file.suffix, "text")):
        members = list(group)
        if kind == "json":
            parts += split_json_lines_files(members, field)
        elif kind == "parquet":
            parts += split_parquet_files(members, field)
        elif kind == "arrow":
            parts += [ArrowPart(file, field) for file in members]
        else:
            parts += group_text_files(members)
    return parts
