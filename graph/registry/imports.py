"""What `--import` offers: a package or a module by its name, or a folder or a Python file by its path."""

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import attrs

from drawloom.graph.registry.registry import DECORATED, Candidate, PackageSource, Source

NAME = re.compile(r"[a-z][a-z0-9_]*")
"""Names of folders and files that a recipe can write."""


@attrs.frozen
class FileSource:
    """One Python file, which holds a component of its name."""

    module: str
    path: Path

    def names(self) -> list[str]:
        return [self.module]

    def candidates(self, use: str) -> list[Candidate]:
        return [Candidate(self.module, distribution=str(self.path))] if use == self.module else []


def find_source(text: str) -> Source:
    """
    The components of a package, module, folder or file. Only the parents of a package are imported.

    The folder in which a folder or file is becomes the last one in which Python looks for modules, also in processes
    that this one starts. Raises LookupError if there is no such thing, or if Python finds another by its name.
    """
    is_path = text.endswith(".py") or os.sep in text or text.startswith(".")
    if not is_path and (found := _find_by_name(text)):
        return _require_component(found)
    path = Path(text if is_path or os.path.isdir(text) else f"{text}.py").absolute()
    if not path.exists():
        raise LookupError(f"there is no package, folder or file {text!r}")
    if not NAME.fullmatch(path.stem if path.is_file() else path.name):
        raise LookupError(f"{path.name} can't be named in a recipe; rename it, with a-z, 0-9 and _")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        importlib.invalidate_caches()
    found = _find_by_name(path.stem)
    where = None if found is None else found.folder if isinstance(found, PackageSource) else found.path
    if found is None or where is None or not os.path.samefile(where, path):
        raise LookupError(f"Python imports {where} by the name {path.stem}; rename {path.name}")
    return _require_component(found)


def _find_by_name(name: str) -> PackageSource | FileSource | None:
    """A package or a module; None if Python finds none."""
    try:
        found = find_spec(name)
    except ModuleNotFoundError:
        return None
    if found is not None and found.submodule_search_locations:
        return PackageSource(name, Path(next(iter(found.submodule_search_locations))), f"{name}.")
    if found is None or not found.has_location or not found.origin:
        return None
    return FileSource(name, Path(found.origin))


def _require_component(found: PackageSource | FileSource) -> Source:
    if isinstance(found, FileSource) and not DECORATED.search(found.path.read_text("utf-8")):
        raise LookupError(f"{found.path} holds no component; write @component above its class")
    return found
