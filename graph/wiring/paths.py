"""Paths in settings: relative to the folder of a lock file, or to the current directory."""

import os
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.problems import KeyPath


def join_paths(value: Any, get_folder: Callable[[KeyPath], str], *, globs: bool = False, path: KeyPath = ()) -> Any:
    """
    Return a setting's value with relative paths below the folder for their key path; unchanged below "".

    With `globs`, strings are paths or globs, except URLs.
    """

    def join_part(key: Any, part: Any) -> Any:
        return join_paths(part, get_folder, globs=globs, path=(*path, key))

    match value:
        case Path():
            return get_folder(path) / value if not value.is_absolute() and get_folder(path) else value
        case str() if globs and "://" not in value and (folder := get_folder(path)):
            return os.path.join(escape(folder), value)
        case list() | tuple():
            return type(value)(join_part(number, part) for number, part in enumerate(value))
        case Mapping():
            return {key: join_part(key, part) for key, part in value.items()}
        case _ if attrs.has(type(value)):
            fields = [field for field in attrs.fields(type(value)) if field.init]
            return attrs.evolve(
                value, **{field.alias: join_part(field.alias, getattr(value, field.name)) for field in fields}
            )
    return value
