"""Components by name, wherever they come from."""

from pathlib import Path

import attrs

from drawloom.graph.problems import Problem
from drawloom.graph.registry.sources import Candidate, EntryPointSource, PackageSource, Source
from drawloom.graph.registry.spec import Spec, read_spec
from drawloom.graph.toml.suggest import nearest


@attrs.define
class Registry:
    """
    The components of a package, of installed distributions that declare some for it, and of packages `beside` it.

    A module is imported when its component is asked for, and no other. A name that two bring is a problem.
    """

    own: PackageSource
    installed: EntryPointSource
    extra: tuple[PackageSource, ...] = ()
    _specs: dict[str, Spec | Problem] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, package: str) -> "Registry":
        """The catalogue of an importable package, which is not imported by this."""
        return cls(PackageSource.of(package), EntryPointSource(package))

    def with_package(self, package: str) -> "Registry":
        """
        This catalogue and the components below another package, named by their whole dotted path.

        A LookupError if there is no such package.
        """
        return Registry(self.own, self.installed, (*self.extra, PackageSource.of(package, f"{package}.")))

    @property
    def package(self) -> str:
        return self.own.package

    @property
    def folder(self) -> Path:
        """Where the package's own components stand."""
        return self.own.folder

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.own, self.installed, *self.extra)

    def names(self) -> list[str]:
        """Every component's name, found without importing any."""
        return list(dict.fromkeys(name for source in self.sources for name in source.names()))

    def candidates(self, use: str) -> list[Candidate]:
        """Whoever brings a component of this name."""
        return [holder for source in self.sources for holder in source.candidates(use)]

    def find(self, use: str) -> Spec | Problem:
        """The component of a name, or what is wrong with the name."""
        if use not in self._specs:
            self._specs[use] = self._find(use)
        return self._specs[use]

    def _find(self, use: str) -> Spec | Problem:
        holders = self.candidates(use)
        if not holders:
            return Problem("DL201", f"no component is called {use!a}", self._near(use))
        if len(holders) > 1:
            who = " and ".join(holder.distribution for holder in holders)
            return Problem("DL207", f"{use!r} is brought by {who}", "uninstall one of them")
        try:
            found = holders[0].load()
        except Exception as error:
            return self._unimportable(use, holders[0], error)
        if len(found) != 1:
            return Problem("DL203", f"{use!r} is no component, but {_instead(holders[0])}", self._siblings(use))
        try:
            return read_spec(use, found[0], holders[0].distribution if holders[0].installed else "")
        except Exception as error:
            return Problem("DL206", f"{use!r} can't be read: {type(error).__name__}: {error}", "tell its author")

    def _unimportable(self, use: str, holder: Candidate, error: Exception) -> Problem:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        own = holder.module.partition(".")[0]
        if missing and missing.partition(".")[0] != own:
            text = f"{use!r} needs the package {missing!r}, which is not installed"
            return Problem("DL202", text, f"pip install {missing.partition('.')[0]}")
        text = f"{use!r} can't be imported: {type(error).__name__}: {error}"
        return Problem("DL205", text, f"`python -c 'import {holder.module}'` says where")

    def _siblings(self, use: str) -> str:
        beside = f"{use.rpartition('.')[0]}."
        near = [name for name in self.names() if name.startswith(beside)]
        return f"beside it there is {', '.join(near)}" if near else ""

    def _near(self, use: str) -> str:
        """What may have been meant: a component of the same subject, or else of any."""
        names = self.names()
        inside = [name for name in names if name.startswith(f"{use}.")]
        if inside:
            return f"in it there is {', '.join(inside)}"
        beside = [name for name in names if name.partition(".")[0] == use.partition(".")[0]]
        near = nearest(use, beside) or nearest(use, names)
        return f"did you mean {near!r}?" if near else "`drawloom list` shows all that there are"


def _instead(holder: Candidate) -> str:
    return f"{holder.module}:{holder.attribute}" if holder.installed else "a library module"
