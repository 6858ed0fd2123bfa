"""File parts; file extensions determine formats."""

from collections.abc import Sequence
from itertools import groupby

from drawloom.components.data.sources.documents import Part
from drawloom.components.data.sources.files import File
from drawloom.components.data.sources.json_lines import json_lines_parts
from drawloom.components.data.sources.tables import ArrowPart, parquet_parts
from drawloom.components.data.sources.text import text_parts

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def parts_of(files: Sequence[File], field: str) -> list[Part]:
    """Divide files into parts, in order; a file with an unknown extension is a text."""
    parts: list[Part] = []
    for kind, group in groupby(files, key=lambda file: FORMATS.get(file.suffix, "text")):
        members = list(group)
        if kind == "json":
            parts += json_lines_parts(members, field)
        elif kind == "parquet":
            parts += parquet_parts(members, field)
        elif kind == "arrow":
            parts += [ArrowPart(file, field) for file in members]
        else:
            parts += text_parts(members)
    return parts
