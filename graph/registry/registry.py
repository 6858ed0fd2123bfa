"""
The registry of components by name: files of packages, and entry points of installed distributions.

A component's settings and edges are read once from its class fields.
"""

import importlib
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from drawloom.graph.component import (
    NAME,
    Check,
    Every,
    Impact,
    Ordered,
    Traits,
    internal,
    is_port_or_component,
    read_annotations,
)
from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.recipe.lockfile import ResolvedRecipe

Kind = Literal["setting", "one", "optional", "list", "mapping", "ordered", "every", "recipe"]


@attrs.frozen
class Field:
    """
    A field of a component: a setting, an edge, or a field filled by the container.

    An edge leads to one node, an optional node, a list, a mapping or a sequence. The container fills `every` node of a
    port, or the resolved `recipe`. An edge with `is_wired` is found by type. The strings of a setting with
    `globs` are paths or globs. Settings with the same `one_of` exclude one another.
    """

    name: str
    kind: Kind
    type: Any
    ports: tuple[type, ...] = ()
    default: Any = attrs.field(factory=lambda: attrs.NOTHING)
    attribute: str = ""
    impact: Impact = "changes_training"
    check: Check | None = None
    doc: str = ""
    is_wired: bool = False
    globs: bool = False
    one_of: str = ""
    required: bool = internal()
    is_edge: bool = internal()

    @required.default
    def _has_no_default(self) -> bool:
        return self.default is attrs.NOTHING

    @is_edge.default
    def _is_edge(self) -> bool:
        return self.kind in ("one", "optional", "list", "mapping", "ordered")

    @property
    def target(self) -> str:
        """The target of an edge, such as "any number of Metric"."""
        port = " or ".join(port.__name__ for port in self.ports)
        many = {
            "optional": f"{port}, if there is one" if self.is_wired else f"{port}, or none",
            "list": f"every {port}" if self.is_wired else f"any number of {port}",
            "mapping": f"named {port}",
            "ordered": f"a sequence of {port}",
        }
        return many.get(self.kind, port)

    def default_value(self) -> Any:
        """Return the default; a factory makes a new object for every call."""
        return self.default.factory() if isinstance(self.default, attrs.Factory) else self.default  # type: ignore[arg-type]


@attrs.frozen
class Spec:
    """A component class as recipes see it. `distribution` provides it; empty for the program's own components."""

    use: str
    cls: type
    fields: dict[str, Field]
    traits: Traits
    distribution: str = ""

    @cached_property
    def settings(self) -> tuple[Field, ...]:
        """The settings among the fields."""
        return self._select_fields("setting")

    @cached_property
    def edges(self) -> tuple[Field, ...]:
        """The edges among the fields."""
        return tuple(field for field in self.fields.values() if field.is_edge)

    @cached_property
    def sequences(self) -> tuple[Field, ...]:
        """The edges with a checked order."""
        return self._select_fields("ordered")

    @cached_property
    def has_constraints_method(self) -> bool:
        """Whether the component checks settings and neighbours together."""
        return hasattr(self.cls, "constraints")

    @cached_property
    def fields_of_kind_every(self) -> tuple[Field, ...]:
        """The fields that the container fills with every node of a port."""
        return self._select_fields("every")

    @cached_property
    def fields_of_kind_recipe(self) -> tuple[Field, ...]:
        """The fields that the container fills with the resolved recipe."""
        return self._select_fields("recipe")

    def _select_fields(self, kind: Kind) -> tuple[Field, ...]:
        return tuple(field for field in self.fields.values() if field.kind == kind)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.cls.__doc__ or "").strip().partition("\n")[0]


@lru_cache(maxsize=1024)  # every recipe has its own registry, and loading takes a third less with classes read before
def read_spec(use: str, cls: type, distribution: str = "") -> Spec:
    """Read the settings and edges of a component class."""
    traits: Traits = vars(cls)["__component__"]
    attributes = [attribute for attribute in attrs.fields(cls) if attribute.init]
    hints = read_annotations(cls, {attribute.name for attribute in attributes})
    fields = [_read_field(attribute, hints[attribute.name], traits.impact) for attribute in attributes]
    return Spec(use, cls, {field.name: field for field in fields}, traits, distribution)


def _read_field(attribute: "attrs.Attribute[Any]", kind: Any, impact: Impact) -> Field:
    field_kind, ports = _classify_annotation(kind)
    meta = attribute.metadata
    return Field(
        name=attribute.alias or attribute.name,
        kind=field_kind,
        type=kind,
        ports=ports,
        default=attribute.default,
        attribute=attribute.name,
        impact=meta.get("impact") or impact,
        check=meta.get("check"),
        doc=meta.get("doc", ""),
        is_wired=meta.get("wired", False),
        globs=meta.get("globs", False),
        one_of=meta.get("one_of", ""),
    )


def _classify_annotation(kind: Any) -> tuple[Kind, tuple[type, ...]]:
    """Return the kind of field for an annotated type, and the ports of its targets."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is ResolvedRecipe:
        return "recipe", ()
    if origin is Every:
        return "every", _find_ports(arguments[0])
    if origin is Ordered:
        return "ordered", _find_ports(arguments[0])
    if origin in (list, tuple, Sequence) and arguments and _find_ports(arguments[0]):
        return "list", _find_ports(arguments[0])
    if origin in (dict, Mapping) and len(arguments) == 2 and _find_ports(arguments[1]):
        return "mapping", _find_ports(arguments[1])
    if ports := _find_ports(kind):
        return ("optional" if type(None) in arguments else "one"), ports
    return "setting", ()


def _find_ports(kind: Any) -> tuple[type, ...]:
    """Return the ports in a type or a union of ports. Empty if any member is not a port."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [member for member in typing.get_args(kind) if member is not type(None)] if union else [kind]
    plain = [typing.get_origin(member) or member for member in members]
    return tuple(plain) if plain and all(is_port_or_component(member) for member in plain) else ()


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
            from drawloom.graph.registry.suggestions import suggest_name

            return Problem("DL201", f"no component is called {use!a}", suggest_name(use, self.names()))
        if len(candidates) > 1:
            distributions = " and ".join(candidate.distribution for candidate in candidates)
            return Problem("DL207", f"{use!r} is provided by {distributions}", "uninstall one of them")
        try:
            classes = candidates[0].load()
        except Exception as error:
            from drawloom.graph.registry.suggestions import make_import_problem

            return make_import_problem(use, candidates[0].module, error)
        if len(classes) > 1:
            names = " and ".join(item.__name__ for item in classes)
            return Problem("DL203", f"{use!r} contains the components {names}", "move every class to a file of its own")
        if not classes:
            from drawloom.graph.registry.suggestions import describe_siblings

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
