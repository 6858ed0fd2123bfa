"""Component classes as recipes see them: settings and edges, read once from the class fields."""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import attrs

from drawloom.graph.component import (
    Check,
    Every,
    Impact,
    Ordered,
    Traits,
    internal,
    is_port_or_component,
    read_annotations,
)
from drawloom.graph.recipe.lockfile import ResolvedRecipe

# Lower case only, so that a name means the same file on case-insensitive file systems.
NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
"""Valid names of components: dotted, so that a name can only lead below the folder of its package."""

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
