"""
The vocabulary for components: `@component`, `setting` and its bounds, `@port`, and special field types.

A component is an attrs class. A field whose type is a port is an edge; every other field is a setting.
"""

import inspect
import re
import typing
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform, overload

import attrs

T = TypeVar("T")
P = TypeVar("P")

Impact = Literal["safe", "changes_training", "incompatible"]
Check = Callable[[Any], str | None]

# Lower case only, so that a name means the same file on case-insensitive file systems.
NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
"""Valid names of components: dotted, so that a name can only lead below the folder of its package."""


def setting(
    doc: str = "",
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    impact: Impact | None = None,
    check: Check | None = None,
    alias: str | None = None,
    globs: bool = False,
    one_of: str = "",
) -> Any:
    """
    Declare a field that a recipe sets.

    `impact` is the effect of another value on a resumed run: safe (training computes the same), changes_training
    (training continues with other results) or incompatible (saved state no longer fits). Default: the impact of the
    component. `check` receives the value and returns why it is invalid, or None. `alias` is the name in recipes and in
    the constructor, for a field whose own name clashes with a method or property. `globs` is true if its strings are
    paths or globs: like Paths, they are relative to the folder where a run was started. Settings of a component with
    the same name `one_of` exclude one another, such as lengths in steps and in epochs: the last layer's counts, and two
    in one layer are a problem.
    """
    default = attrs.Factory(factory) if factory is not None else default
    meta = {"impact": impact, "check": check, "doc": doc, "globs": globs, "one_of": one_of}
    return attrs.field(default=default, validator=check and _make_validator(check), metadata=meta, alias=alias)


def internal(
    default: Any = attrs.NOTHING, *, factory: Callable[[], Any] | None = None, init: Literal[False] = False
) -> Any:
    """Declare a field set by its own object: neither an argument of the constructor, nor a setting or an edge."""
    return attrs.field(init=init, default=attrs.Factory(factory) if factory else default)


def wired(*, default: Any = attrs.NOTHING, factory: Callable[[], Any] | None = None) -> Any:
    """
    Declare an edge for the container to find by type unless the recipe writes it.

    `tokenizer: Tokenizer | None = wired(default=None)` is the only fitting node, like a required edge, and None without
    one. `features: list[StageFeature] = wired(factory=list)` are all fitting nodes, in the recipe's order. Other edges
    with defaults keep them unless the recipe writes them.
    """
    return attrs.field(default=attrs.Factory(factory) if factory else default, metadata={"wired": True})


def _make_validator(check: Check) -> Callable[[Any, Any, Any], None]:
    # For components built without a recipe, as in tests. A recipe is checked before anything is built.
    def validate(_owner: Any, field: Any, value: Any) -> None:
        if reason := check(value):
            raise ValueError(f"{field.alias}: {reason}")

    return validate


@attrs.frozen
class Bound:
    """Check of a number against bounds, which also appear in the JSON Schema. Values of other types pass."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, value: Any) -> str | None:
        if not isinstance(value, int | float):
            return None
        if self.at_least is not None and self.below is not None:
            if self.at_least <= value < self.below:
                return None
            if isinstance(value, int) and isinstance(self.below, int) and self.below > 1:
                less = f"{value} is less than {self.at_least}"
                return less if value < self.at_least else f"{value} is more than {self.below - 1}"
            return f"{value} is not in [{self.at_least}, {self.below})"
        if self.at_least is not None and value < self.at_least:
            return f"{value} is less than {self.at_least}"
        return f"{value} is not above {self.above}" if self.above is not None and value <= self.above else None


def at_least(bound: float) -> Bound:
    """Return a check for `bound` or more."""
    return Bound(at_least=bound)


def above(bound: float) -> Bound:
    """Return a check for more than `bound`."""
    return Bound(above=bound)


def between(low: float, exclusive_high: float) -> Bound:
    """Return a check for the half-open interval [low, high)."""
    return Bound(at_least=low, below=exclusive_high)


_PORTS: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()
"""Ports with their `named` flags. Stored here, because an attribute of a Protocol would be one of its members."""


@overload
def port(cls: type[T], /) -> type[T]: ...
@overload
def port(*, named: bool = False) -> Callable[[type[T]], type[T]]: ...
def port(cls: Any = None, /, *, named: bool = False) -> Any:
    """
    Mark a class, usually a Protocol, as an interface between components.

    A component field of this type is an edge. With `named`, nodes implementing the port need their own tables and can't
    be written inline, because their names are keys of saved state.
    """

    def mark(cls: type[T]) -> type[T]:
        _PORTS[cls] = named
        return cls

    return mark if cls is None else mark(cls)


def read_annotations(cls: type, names: Collection[str]) -> dict[str, Any]:
    """
    Return the annotated types of a class's attributes with these names.

    Other attributes, such as private ones, may have a type known to type checkers alone. Raises NameError for a name
    in an annotation that is not defined.
    """
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = {name: kind for name, kind in inspect.get_annotations(base).items() if name in names}
        types |= typing.get_type_hints(type(base.__name__, (), {"__annotations__": own, "__module__": base.__module__}))
    return types


def is_port_or_component(kind: object) -> bool:
    """Return whether fields of this type are edges: true for ports, and for component classes themselves."""
    kind = typing.get_origin(kind) or kind
    # vars, not hasattr: a subclass does not inherit the mark.
    return isinstance(kind, type) and (kind in _PORTS or "__component__" in vars(kind))


def port_needs_named_nodes(port: type) -> bool:
    """Return whether nodes implementing this port need their own tables, and so names."""
    return _PORTS.get(port, False)


class Every(dict[str, P]):
    """
    All built nodes implementing a port, by node name. The container fills it after building, and empties it after
    closing.

    It is not an edge, so it makes no cycle: a checkpointer sees every stateful node, and stateful nodes may use it.
    """


class Ordered(tuple[P, ...]):
    """
    Members in a sequence edge, in the recipe's order. Checks compare the values read, written and changed by the
    members.
    """

    names: tuple[str, ...]

    def __new__(cls, members: Sequence[P] = (), names: Sequence[str] = ()) -> "Ordered[P]":
        self = super().__new__(cls, tuple(members))
        self.names = tuple(names) or tuple(type(member).__name__ for member in members)
        return self


@attrs.frozen
class Flow:
    """Values read, written and changed in place by a member of a sequence edge."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@attrs.frozen
class Traits:
    """Arguments of `@component`, stored on the class as `__component__`."""

    impact: Impact
    flow: Flow
    needs: Mapping[str, str] = attrs.field(factory=dict)
    opens_first: str = ""
    replaced_keys: Mapping[str, str] = attrs.field(factory=dict)


def find_declared_reads_and_writes(component: object) -> Flow:
    """Return the declared flow of a component, which is an object or a class; an empty one if it declares none."""
    traits: Traits | None = getattr(component, "__component__", None)
    return Flow() if traits is None else traits.flow


@overload
def component(cls: type[T], /) -> type[T]: ...
@overload
def component(
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    changes: Sequence[str] = (),
    impact: Impact = "changes_training",
    needs: Mapping[str, str] | None = None,
    opens_first: str = "",
    replaced_keys: Mapping[str, str] | None = None,
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True, field_specifiers=(setting, wired, internal, attrs.field))
def component(
    cls: Any = None,
    /,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    changes: Sequence[str] = (),
    impact: Impact = "changes_training",
    needs: Mapping[str, str] | None = None,
    opens_first: str = "",
    replaced_keys: Mapping[str, str] | None = None,
) -> Any:
    """
    Make a class a component: an attrs class with keyword arguments, named in recipes by the path of its file.

    Members of a sequence edge declare the values they read, write and change in place. A value named with a final "?"
    is read only if some member writes it. `impact` is the effect on a resumed run when this node is added, removed,
    swapped or changed: see `setting`. `needs` maps modules imported when the component opens to arguments for `pip
    install`: {"aim": "drawloom[aim]"}. The nodes of the edge `opens_first`, and their dependencies, are built and
    opened before the nodes of all other edges, whatever the order of fields. `replaced_keys` maps unknown keys to
    the recipe lines in their place, for the message about the key.

    `check` calls these class methods, if the class has them, without building the component:

    - `constraints(node)` yields problems involving several settings, or settings of neighbours;
    - `notes(node)` yields lines about the node for `explain`, and for `draw` with the focus on it;
    - `resume_impact(node, key)` returns the effect of another value of a key on a resumed run, alone or with the reason
      as a tuple, or None;
    - `settings_to_stay_in_folder(settings, explicit_keys, folder)` returns settings for a run in the folder from which
      its recipe was read; `explicit_keys` lists the keys that overlays or the command line set.

    The container calls `open()`, `close()` and `on_failure(error)` of objects with these methods. It opens and closes
    other objects in the contexts that their `lifecycle_context(stage, node)` returns, also before their own `open()`.
    `run --dry-run` opens objects with `preview()`, which returns a description of the run before its first step. Before
    the container opens the first node, it calls every `check_before_open()`, and so does `check`: the method
    raises a UserError if this machine lacks a file or device named in the settings. It reads little, leaves nothing
    open, and uses other nodes only in their state before `open`.
    """

    def make(cls: type[T]) -> type[T]:
        # No slots, so that components may use cached_property; equality by identity, since fields contain tensors.
        attrs_class = attrs.define(cls, slots=False, eq=False, kw_only=True, repr=False)
        if "__repr__" not in vars(cls):
            attrs_class.__repr__ = _repr_without_edges  # type: ignore[method-assign]
        flow = Flow(tuple(reads), tuple(writes), tuple(changes))
        traits = Traits(impact, flow, dict(needs or {}), opens_first, dict(replaced_keys or {}))
        attrs_class.__component__ = traits  # type: ignore[attr-defined]
        return attrs_class

    return make if cls is None else make(cls)


def _repr_without_edges(self: Any) -> str:
    """Return a component's class and plain settings, without edges: these lead to all objects in a run."""
    values = {field.name: getattr(self, field.name, None) for field in attrs.fields(type(self)) if field.init}
    settings = [f"{name}={value!r}" for name, value in values.items() if isinstance(value, str | int | float)]
    return f"{type(self).__name__}({', '.join(settings)})"


@dataclass_transform(kw_only_default=True, field_specifiers=(setting, wired, internal, attrs.field))
def component_base_class(cls: type[T]) -> type[T]:
    """Let components inherit the fields of a class that is not a component."""
    return attrs.define(cls, slots=False, eq=False, kw_only=True)
