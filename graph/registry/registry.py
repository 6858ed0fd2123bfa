"""The registry of components by name: files of packages, and entry points of installed distributions."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Protocol

import attrs

from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.registry.spec import NAME, Spec, read_spec

# Components are listed by searching text: importing every component would take seconds.
DECORATED = re.compile(r"^@(?:component|reward|tool)\b.*?^(?:class|def) (\w+)", re.MULTILINE | re.DOTALL)
"""A component: a class, or a function that is a reward or a tool."""


class Source(Protocol):
    """Source of components by name. It imports a component only to load it."""

    def names(self) -> list[str]:
        """Return all component names, without importing components."""

    def find_candidates(self, use: str) -> list["Candidate"]:
        """Return the modules that may contain a component with this name: none, one, or several clashing ones."""


@attrs.frozen
class Candidate:
    """A possible module of a component: its name, the attribute if it is known, and its distribution."""

    module: str
    attribute: str = ""
    distribution: str = ""
    installed: bool = False

    def load(self) -> list[type]:
        """Import the module and return its component classes, ideally one. Raises the exceptions of the import."""
        module = importlib.import_module(self.module)
        objects: list[Any] = list(vars(module).values())
        if self.attribute:
            target: Any = module
            for part in self.attribute.split("."):
                target = getattr(target, part)
            objects = [target]
        return [
            item
            for item in objects
            if isinstance(item, type)
            and "__component__" in vars(item)  # not hasattr: a subclass is not a component by itself
            and (self.attribute or item.__module__ == self.module)
        ]


@attrs.frozen(slots=False)
class PackageSource:
    """
    Python files below a package's folder, named by their paths after `prefix`.

    A name is looked up among the files before any import, so a recipe can't import anything else.
    """

    package: str
    folder: Path
    prefix: str = ""

    @classmethod
    def from_package(cls, package: str, prefix: str = "") -> "PackageSource":
        """Return a package's source. Only the parents are imported. Raises LookupError if it does not exist."""
        parent, _, name = package.rpartition(".")
        spec = importlib.util.find_spec(parent or package)
        if spec is None or not spec.submodule_search_locations:
            raise LookupError(f"there is no package {package!r}")
        folder = Path(next(iter(spec.submodule_search_locations)))
        return cls(package, folder / name if parent else folder, prefix)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield every Python file with its name, whether it contains a component or not."""
        for path in sorted(self.folder.rglob("*.py")):
            if path.stem != "__init__":
                yield self.prefix + ".".join(path.relative_to(self.folder).with_suffix("").parts), path

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, path in self.files() if DECORATED.search(path.read_text("utf-8"))]

    def names(self) -> list[str]:
        return list(self._names)

    def find_candidates(self, use: str) -> list[Candidate]:
        inside = use.removeprefix(self.prefix)
        if not NAME.fullmatch(use) or not use.startswith(self.prefix):
            return []
        path = self.folder.joinpath(*inside.split(".")).with_suffix(".py")
        # Unlike Path.is_file, os.path.isfile returns False for a name that is too long for the file system.
        return [Candidate(f"{self.package}.{inside}", distribution=self.package)] if os.path.isfile(path) else []


@attrs.frozen(slots=False)
class EntryPointSource:
    """Components declared as entry points by installed distributions: `name = "package.module:Class"`."""

    group: str

    @cached_property
    def entries(self) -> list[EntryPoint]:
        """The entry points with valid names for components."""
        folders = tuple((path, _modification_time(path)) for path in sys.path)
        return [entry for entry in _read_entry_points(self.group, folders) if NAME.fullmatch(entry.name)]

    def names(self) -> list[str]:
        return sorted({entry.name for entry in self.entries})

    def find_candidates(self, use: str) -> list[Candidate]:
        return [
            Candidate(e.module, e.attr, describe_distribution(e), installed=True) for e in self.entries if e.name == use
        ]


@cache  # reading every distribution takes 30 ms, and tests make hundreds of registries
def _read_entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Return a group's entry points. `folders` are the search path with modification times: installing changes one."""
    return entry_points(group=group)


def _modification_time(path: str) -> int:
    """Return the time of a folder's or file's last change in nanoseconds, or 0 if there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def describe_distribution(entry: EntryPoint) -> str:
    """Return an entry point's distribution, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module


@attrs.define
class Registry:
    """
    Components from a package, from installed distributions extending the package, and from extra sources.

    A module is imported when its component is looked up. A name with two candidates is a problem.
    """

    own: PackageSource
    installed: EntryPointSource
    extra: tuple[Source, ...] = ()
    _specs: dict[str, Spec | Problem] = attrs.field(factory=dict, init=False)

    @classmethod
    def from_package(cls, package: str) -> "Registry":
        """Return the registry of components in a package's files and in installed distributions; imports nothing."""
        return cls(PackageSource.from_package(package), EntryPointSource(package))

    @property
    def package(self) -> str:
        return self.own.package

    @property
    def folder(self) -> Path:
        """The folder of the package's own components."""
        return self.own.folder

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.own, self.installed, *self.extra)

    def names(self) -> list[str]:
        """Return all component names, without importing components."""
        return list(dict.fromkeys(name for source in self.sources for name in source.names()))

    def find_candidates(self, use: str) -> list[Candidate]:
        """Return the possible modules of a component with this name, from all sources."""
        return [candidate for source in self.sources for candidate in source.find_candidates(use)]

    def find(self, use: str) -> Spec | Problem:
        """Return the component with this name, or the problem with the name."""
        # Problems are cached too: a module that fails to import is not imported again for every node.
        if use not in self._specs:
            self._specs[use] = self._look_up_uncached(use)
        return self._specs[use]

    def require(self, use: str) -> Spec:
        """Return the component with this name. Raises RecipeError if there is none."""
        if isinstance(spec := self.find(use), Problem):
            raise RecipeError([spec])
        return spec

    def specs(self) -> list[Spec]:
        """Return all components without a problem."""
        return [spec for spec in map(self.find, self.names()) if isinstance(spec, Spec)]

    def _look_up_uncached(self, use: str) -> Spec | Problem:
        candidates = self.find_candidates(use)
        if not candidates:
            from drawloom.graph.registry.suggestions import suggest_name  # few recipes have problems

            return Problem("DL201", f"no component is called {use!a}", suggest_name(use, self.names()))
        if len(candidates) > 1:
            distributions = " and ".join(candidate.distribution for candidate in candidates)
            return Problem("DL207", f"{use!r} is provided by {distributions}", "uninstall one of them")
        try:
            classes = candidates[0].load()
        except Exception as error:
            return self._make_import_problem(use, candidates[0], error)
        if len(classes) > 1:
            names = " and ".join(item.__name__ for item in classes)
            return Problem("DL203", f"{use!r} contains the components {names}", "move every class to a file of its own")
        if not classes:
            from drawloom.graph.registry.suggestions import describe_siblings  # few recipes have problems

            actual = (
                f"{candidates[0].module}:{candidates[0].attribute}" if candidates[0].installed else "a library module"
            )
            return Problem("DL203", f"{use!r} is not a component, but {actual}", describe_siblings(use, self.names()))
        try:
            return read_spec(use, classes[0], candidates[0].distribution if candidates[0].installed else "")
        except Exception as error:
            return Problem(
                "DL206",
                f"{use!r} can't be read: {type(error).__name__}: {error}",
                "report it to the author of the component",
            )

    def _make_import_problem(self, use: str, candidate: Candidate, error: Exception) -> Problem:
        """Return the problem with a component whose module can't be imported: a missing package, or any other error."""
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        own = candidate.module.partition(".")[0]
        if missing and missing.partition(".")[0] != own:
            text = f"{use!r} needs the package {missing!r}, which is not installed"
            return Problem("DL202", text, f"pip install {missing.partition('.')[0]}")
        text = f"{use!r} can't be imported: {type(error).__name__}: {error}"
        return Problem("DL205", text, f"`python -c 'import {candidate.module}'` prints the traceback")
