"""Corpus on every machine with Python: the standard library's source, without its tests."""

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drawloom import UserError, component
from drawloom.components.data.sources.documents import DividedCorpus, Part, validation_fraction

if TYPE_CHECKING:
    from drawloom.components.data.sources.files import File

UNUSED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
GENERATED = ("config-", "_sysconfigdata_")
"""Prefixes of files that the build of Python generates, and that differ between machines."""


def list_source_files() -> "list[File]":
    """Return the running Python's modules, sorted by path below `stdlib`. Raises UserError if there are none."""
    from drawloom.components.data.sources.files import stat_local_file

    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in UNUSED and not name.startswith(GENERATED)]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(GENERATED)]
    if not paths:
        raise UserError(f'{root}: this Python has no source files; write use = "data.text_files"')
    return sorted(
        (stat_local_file(path.relative_to(root).as_posix(), path) for path in paths), key=lambda file: file.name
    )


@component
class StandardLibrary(DividedCorpus):
    """The standard library's source, one document per module, without tests and installed packages."""

    validation_fraction: float = validation_fraction("files")

    def divide(self) -> Sequence[Part]:
        from drawloom.components.data.sources.files import group_text_files

        return group_text_files(list_source_files(), replace_invalid=True)
