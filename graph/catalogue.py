"""Components by name: the name is the path of a file below a package's folder."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from drawloom.graph.problems import Problem
from drawloom.graph.spec import Spec, read_spec
from drawloom.graph.suggest import nearest

NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
DECORATED = re.compile(r"^@component\b", re.MULTILINE)


@attrs.define
class Catalogue:
    """
    The components of a package. Modules are imported when their component is asked for, and no others.

    A recipe can only name what stands below the package: a name is looked up among its files before any import.
    """

    package: str
    folder: Path
    _specs: dict[str, Spec | Problem] = attrs.field(factory=dict, init=False)
    _names: list[str] | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, package: str) -> "Catalogue":
        """The catalogue of an importable package, which is not imported by this."""
        parent, _, name = package.rpartition(".")
        found = importlib.util.find_spec(parent)
        if found is None or not found.submodule_search_locations:
            raise ValueError(f"there is no package {parent!r}")
        return cls(package, Path(next(iter(found.submodule_search_locations))) / name)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Every Python file below the package by its name, components and library modules alike."""
        for path in sorted(self.folder.rglob("*.py")):
            if path.stem != "__init__":
                yield ".".join(path.relative_to(self.folder).with_suffix("").parts), path

    def names(self) -> list[str]:
        """Every component's name, found in the text of the files, without importing them."""
        if self._names is None:
            self._names = [name for name, path in self.files() if DECORATED.search(path.read_text("utf-8"))]
        return list(self._names)

    def find(self, use: str) -> Spec | Problem:
        """The component of a name, or what is wrong with the name."""
        if use not in self._specs:
            self._specs[use] = self._find(use)
        return self._specs[use]

    def _near(self, use: str) -> str:
        """What may have been meant: a component of the same subject, or else of any."""
        names = self.names()
        inside = [name for name in names if name.startswith(f"{use}.")]
        if inside:
            return f"in it there is {', '.join(inside)}"
        beside = [name for name in names if name.partition(".")[0] == use.partition(".")[0]]
        near = nearest(use, beside) or nearest(use, names)
        return f"did you mean {near!r}?" if near else "`drawloom list` shows all that there are"

    def _find(self, use: str) -> Spec | Problem:
        path = self.folder.joinpath(*use.split(".")).with_suffix(".py") if NAME.fullmatch(use) else None
        if path is None or not path.is_file():
            return Problem("DL201", f"no component is called {use!a}", self._near(use))
        try:
            module = importlib.import_module(f"{self.package}.{use}")
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
            if missing and not f"{missing}.".startswith(f"{self.package.partition('.')[0]}."):
                text = f"{use!r} needs the package {missing!r}, which is not installed"
                return Problem("DL202", text, f"pip install {missing.partition('.')[0]}")
            why = f"{type(error).__name__}: {error}"
            return Problem(
                "DL205", f"{use!r} can't be imported: {why}", f"`python -c 'import {self.package}.{use}'` says where"
            )
        found = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and "__component__" in vars(item) and item.__module__ == module.__name__
        ]
        if len(found) != 1:
            near = [name for name in self.names() if name.startswith(use.rpartition(".")[0] + ".")]
            hint = f"its subject has {', '.join(near)}" if near else ""
            return Problem("DL203", f"{use!r} is a library module, so there is no component in it", hint)
        try:
            return read_spec(use, found[0])
        except Exception as error:
            return Problem("DL206", f"{use!r} can't be read: {type(error).__name__}: {error}", "tell its author")
