"""Components as recipes see them: each field read once from its class."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from drawloom.graph.component import Traits
from drawloom.graph.port import Every, Ordered, is_port
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.setting import Change, Check, Names

Kind = Literal["setting", "one", "optional", "list", "mapping", "ordered", "every", "recipe"]


@attrs.frozen
class Field:
    """One field of a component, read once from its class."""

    name: str
    kind: Kind
    type: Any
    ports: tuple[type, ...] = ()
    default: Any = attrs.field(factory=lambda: attrs.NOTHING)
    attribute: str = ""
    change: Change = "semantic"
    check: Check | None = None
    names: Names | None = None
    may_name: bool = False
    doc: str = ""
    required: bool = attrs.field(init=False)
    is_edge: bool = attrs.field(init=False)

    @required.default
    def _required(self) -> bool:
        return self.default is attrs.NOTHING

    @is_edge.default
    def _is_edge(self) -> bool:
        return self.kind in ("one", "optional", "list", "mapping", "ordered")

    def default_value(self) -> Any:
        """A fresh default."""
        return self.default.factory() if isinstance(self.default, attrs.Factory) else self.default  # type: ignore[arg-type]


@attrs.frozen
class Spec:
    """A component class as recipes see it. `brought_by` is the distribution, if that is not the program's own."""

    use: str
    cls: type
    fields: dict[str, Field]
    traits: Traits
    every_fields: tuple[Field, ...] = ()
    distribution: str = ""

    @property
    def doc(self) -> str:
        """The first line of the docstring."""
        return (self.cls.__doc__ or "").strip().partition("\n")[0]


def read_spec(use: str, cls: type, brought_by: str = "") -> Spec:
    """What a component class asks for and can be told."""
    hints = typing.get_type_hints(cls)
    traits: Traits = vars(cls)["__component__"]
    fields = [_read_field(a, hints[a.name], traits.change) for a in attrs.fields(cls) if a.init]
    every = tuple(field for field in fields if field.kind == "every")
    return Spec(use, cls, {field.name: field for field in fields}, traits, every, brought_by)


def _read_field(attribute: "attrs.Attribute[Any]", kind: Any, change: Change) -> Field:
    sort, ports = _sort(kind)
    meta = attribute.metadata
    return Field(
        name=attribute.alias or attribute.name,
        kind=sort,
        type=kind,
        ports=ports,
        default=attribute.default,
        attribute=attribute.name,
        change=meta.get("change") or change,
        check=meta.get("check"),
        names=meta.get("names"),
        may_name=bool(meta.get("names")) or (sort == "setting" and _names_inside(kind)),
        doc=meta.get("doc", ""),
    )


def _sort(kind: Any) -> tuple[Kind, tuple[type, ...]]:
    """Which sort of field a type makes, and the ports that its members must fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is ResolvedRecipe:
        return "recipe", ()
    if origin is Every:
        return "every", _ports(arguments[0])
    if origin is Ordered:
        return "ordered", _ports(arguments[0])
    if origin in (list, tuple, Sequence) and arguments and _ports(arguments[0]):
        return "list", _ports(arguments[0])
    if origin in (dict, Mapping) and len(arguments) == 2 and _ports(arguments[1]):
        return "mapping", _ports(arguments[1])
    if ports := _ports(kind):
        return ("optional" if type(None) in arguments else "one"), ports
    return "setting", ()


def _names_inside(kind: Any) -> bool:
    """Whether a part of a setting may name something."""
    if attrs.has(kind):
        fields = attrs.fields(attrs.resolve_types(kind))
        return any(field.metadata.get("names") or _names_inside(field.type) for field in fields)
    return any(_names_inside(part) for part in typing.get_args(kind))


def _ports(kind: Any) -> tuple[type, ...]:
    """The ports in a type or a union of them; empty when any member is none."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [member for member in typing.get_args(kind) if member is not type(None)] if union else [kind]
    plain = [typing.get_origin(member) or member for member in members]
    return tuple(plain) if plain and all(is_port(member) for member in plain) else ()
