"""Files of the standard library's source, without its tests."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from drawloom.components.data.sources.files import File, stat_local_file
from drawloom.graph import UserError

TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
GENERATED = ("config-", "_sysconfigdata_")
"""Prefixes of files that the build of Python generates, and that differ between machines."""


def list_source_files() -> list[File]:
    """Return the running Python's modules, sorted by path below `stdlib`. Raises UserError if there are none."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk_source_files(root) if path.suffix == ".py" and not path.name.startswith(GENERATED)]
    if not paths:
        raise UserError(f'{root}: this Python has no source files; write use = "data.text_files"')
    return sorted(
        (stat_local_file(path.relative_to(root).as_posix(), path) for path in paths), key=lambda file: file.name
    )


def _walk_source_files(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, except in folders with tests or installed packages."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_neither_tests_nor_generated(name)]
        yield from (Path(folder, name) for name in names)


def _is_neither_tests_nor_generated(folder: str) -> bool:
    """Return whether a folder has neither tests nor installed or generated files."""
    return folder not in TESTS | INSTALLED and not folder.startswith(GENERATED)
