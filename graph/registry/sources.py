"""Where components come from: the folder of a package, or the entry points of what is installed."""

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

import attrs

NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
"""What a component can be called: nothing that leads anywhere but down from where it is looked for."""

DECORATED = re.compile(r"^@component\b", re.MULTILINE)


class Source(Protocol):
    """Knows components by name, and imports one only when it is asked to load it."""

    def names(self) -> list[str]:
        """Every component's name, found without importing any."""
        ...

    def candidates(self, use: str) -> list["Candidate"]:
        """Whoever has a component of this name: nobody, one, or several that clash."""
        ...


@attrs.frozen
class Candidate:
    """One module that may hold a component: its name, what to look for in it, and who brings it."""

    module: str
    attribute: str = ""
    distribution: str = ""
    installed: bool = False

    def load(self) -> list[type]:
        """Import the module; the components that are meant, which should be one. Raises whatever the import raises."""
        module = importlib.import_module(self.module)
        found: list[Any] = list(vars(module).values())
        if self.attribute:
            named: Any = module
            for part in self.attribute.split("."):
                named = getattr(named, part)
            found = [named]
        return [
            item
            for item in found
            if isinstance(item, type)
            and "__component__" in vars(item)
            and (self.attribute or item.__module__ == self.module)
        ]


@attrs.frozen(slots=False)
class PackageSource:
    """
    The Python files below a package's folder, each named by its path; `prefix` stands before every name.

    A name is looked up among the files before any import, so that a recipe can name nothing else.
    """

    package: str
    folder: Path
    prefix: str = ""

    @classmethod
    def of(cls, package: str, prefix: str = "") -> "PackageSource":
        """The folder of a package, of which only the parents are imported. A LookupError if there is none."""
        parent, _, name = package.rpartition(".")
        found = importlib.util.find_spec(parent or package)
        if found is None or not found.submodule_search_locations:
            raise LookupError(f"there is no package {package!r}")
        folder = Path(next(iter(found.submodule_search_locations)))
        return cls(package, folder / name if parent else folder, prefix)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Every Python file by its name, components and library modules alike."""
        for path in sorted(self.folder.rglob("*.py")):
            if path.stem != "__init__":
                yield self.prefix + ".".join(path.relative_to(self.folder).with_suffix("").parts), path

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, path in self.files() if DECORATED.search(path.read_text("utf-8"))]

    def names(self) -> list[str]:
        return list(self._names)

    def candidates(self, use: str) -> list[Candidate]:
        inside = use.removeprefix(self.prefix)
        if not NAME.fullmatch(use) or not use.startswith(self.prefix):
            return []
        path = self.folder.joinpath(*inside.split(".")).with_suffix(".py")
        # os.path tells of a name that is too long as of one that is not there
        return [Candidate(f"{self.package}.{inside}", distribution=self.package)] if os.path.isfile(path) else []


@attrs.frozen(slots=False)
class EntryPointSource:
    """What installed distributions declare in a group of entry points: `name = "package.module:Class"`."""

    group: str

    @cached_property
    def entries(self) -> list[EntryPoint]:
        """All of them; those of a name that no component can have are left out."""
        return [entry for entry in entry_points(group=self.group) if NAME.fullmatch(entry.name)]

    def names(self) -> list[str]:
        return sorted({entry.name for entry in self.entries})

    def candidates(self, use: str) -> list[Candidate]:
        return [Candidate(e.module, e.attr, distribution(e), installed=True) for e in self.entries if e.name == use]


def distribution(entry: EntryPoint) -> str:
    """The distribution of an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
