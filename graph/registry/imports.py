"""Sources of components for `--import`: a package or module by name, or a folder or Python file by path."""

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
    """A Python file with a component named like the file, or with several, named `file.component`."""

    module: str
    path: Path

    def names(self) -> list[str]:
        names = DECORATED.findall(self.path.read_text("utf-8"))
        return [self.module] if len(names) == 1 else [f"{self.module}.{name}" for name in names]

    def find_candidates(self, use: str) -> list[Candidate]:
        if use != self.module and use not in self.names():
            return []
        return [Candidate(self.module, use.removeprefix(self.module)[1:], str(self.path))]


def find_source_and_extend_sys_path(text: str) -> Source:
    """
    Return the components in a package, module, folder or file. Only the parents of a package are imported.

    The parent folder of a folder or file is appended to Python's module path, also for processes that this process
    starts. Raises LookupError if nothing exists under this name, or if Python finds another module under it.
    """
    is_path = text.endswith(".py") or os.sep in text or text.startswith(".")
    if not is_path and (source := _find_package_or_module(text)):
        return _require_any_component(source)
    path = Path(text if is_path or os.path.isdir(text) else f"{text}.py").absolute()
    if not path.exists():
        raise LookupError(f"there is no package, folder or file {text!r}")
    if not NAME.fullmatch(path.stem if path.is_file() else path.name):
        raise LookupError(f"{path.name} can't be named in a recipe; rename it, using a-z, 0-9 and _")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        importlib.invalidate_caches()
    source = _find_package_or_module(path.stem)
    found_path = None if source is None else source.folder if isinstance(source, PackageSource) else source.path
    if source is None or found_path is None or not os.path.samefile(found_path, path):
        raise LookupError(f"Python imports {found_path} under the name {path.stem}; rename {path.name}")
    return _require_any_component(source)


def _find_package_or_module(name: str) -> PackageSource | FileSource | None:
    """Return a package or a module, or None if Python finds none."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is not None and spec.submodule_search_locations:
        return PackageSource(name, Path(next(iter(spec.submodule_search_locations))), f"{name}.")
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return FileSource(name, Path(spec.origin))


def _require_any_component(source: PackageSource | FileSource) -> Source:
    if isinstance(source, FileSource) and not DECORATED.search(source.path.read_text("utf-8")):
        raise LookupError(
            f"{source.path} contains no component; write @component above a class, or @reward or @tool above a function"
        )
    return source
