"""
The vocabulary that components import: `@component`, `setting` and its bounds, `@port`, and fields of special kinds.

A component is an attrs class. A field whose type is a port is an edge, every other field is a setting.
"""

import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform, overload

import attrs

T = TypeVar("T")
P = TypeVar("P")

Impact = Literal["safe", "changes_training", "incompatible"]
Check = Callable[[Any], str | None]


def setting(
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    impact: Impact | None = None,
    check: Check | None = None,
    doc: str = "",
    alias: str | None = None,
) -> Any:
    """
    A field that a recipe sets.

    `impact` says what it means to resume with another value: safe (training computes the same), changes_training (it
    continues, but computes something else), incompatible (the saved state no longer fits); the component's own if left
    out. `check` takes the value and returns why it is invalid, or None. `alias` is the name in recipes and in the
    constructor, for a field whose own name is taken by a method or property of the component.
    """
    default = attrs.Factory(factory) if factory is not None else default
    meta = {"impact": impact, "check": check, "doc": doc}
    return attrs.field(default=default, validator=check and _as_validator(check), metadata=meta, alias=alias)


def wired(*, default: None) -> Any:
    """
    An optional edge that is found by type, as a required one is; None only if no node fits.

    `tokenizer: Tokenizer | None = wired(default=None)`. Other optional edges are None unless the recipe writes them.
    """
    return attrs.field(default=default, metadata={"wired": True})


def _as_validator(check: Check) -> Callable[[Any, Any, Any], None]:
    # Recipes are checked before anything is built; this serves components that are built directly, as in tests.
    def validate(_owner: Any, field: Any, value: Any) -> None:
        if reason := check(value):
            raise ValueError(f"{field.alias}: {reason}")

    return validate


@attrs.frozen
class Bound:
    """A check of a number against its bounds, which the JSON Schema reads too. Values that are no numbers pass."""

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
    """A check: `bound` or more."""
    return Bound(at_least=bound)


def above(bound: float) -> Bound:
    """A check: more than `bound`."""
    return Bound(above=bound)


def between(low: float, high: float) -> Bound:
    """A check: in the half-open interval [low, high)."""
    return Bound(at_least=low, below=high)


_PORTS: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()
"""Whether each port is named. An attribute of a runtime_checkable Protocol would be one of its members."""


@overload
def port(cls: type[T], /) -> type[T]: ...
@overload
def port(*, named: bool = False) -> Callable[[type[T]], type[T]]: ...
def port(cls: Any = None, /, *, named: bool = False) -> Any:
    """
    Mark a class, most often a Protocol, as an interface between components.

    A component's field of this type is an edge. `named` says that the names of nodes that implement the port matter
    (they are keys of saved state), so that such a node needs a table of its own and can't be written inline.
    """

    def mark(cls: type[T]) -> type[T]:
        _PORTS[cls] = named
        return cls

    return mark if cls is None else mark(cls)


def is_port(kind: object) -> bool:
    """Whether fields of this type are edges: true for ports, and for component classes themselves."""
    kind = typing.get_origin(kind) or kind
    # vars, not hasattr: a subclass of a component is not marked by it.
    return isinstance(kind, type) and (kind in _PORTS or "__component__" in vars(kind))


def is_named(kind: type) -> bool:
    """Whether nodes that implement this port need a table, and so a name, of their own."""
    return _PORTS.get(kind, False)


class Every(dict[str, P]):
    """
    All built nodes that implement a port, by node name; the container fills it after building.

    It is no edge, so it makes no cycle: a checkpointer takes every stateful node, and some of those use it.
    """


class Ordered(tuple[P, ...]):
    """Members of a sequence edge, in the recipe's order; what each reads, writes and changes is checked."""

    names: tuple[str, ...]

    def __new__(cls, members: Sequence[P] = (), names: Sequence[str] = ()) -> "Ordered[P]":
        self = super().__new__(cls, tuple(members))
        self.names = tuple(names) or tuple(type(member).__name__ for member in members)
        return self


@attrs.frozen
class Flow:
    """The values that a member of a sequence edge reads, writes and changes in place."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@attrs.frozen
class Traits:
    """The arguments of `@component`, kept on the class as `__component__`."""

    impact: Impact
    flow: Flow
    needs: Mapping[str, str] = attrs.field(factory=dict)
    opens_first: str = ""


def flow_of(component: object) -> Flow:
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
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True, field_specifiers=(setting, wired, attrs.field))
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
) -> Any:
    """
    Make a class a component: an attrs class with keyword arguments, named in recipes by the path of its file.

    Members of a sequence edge declare which values they read, write and change in place; a value whose name ends in
    "?" is read only if some member writes it. `impact` is what it means to resume with this node added, removed,
    swapped or with other settings: see `setting`. `needs` maps modules that the component imports when it opens to
    what `pip install` takes: {"aim": "drawloom[aim]"}. The nodes of the edge `opens_first`, with what they need, are
    built and opened before those of the component's other edges, whatever the order of its fields.

    `check` calls these class methods, if the class has them, without building the component:

    - `constraints(node)` yields problems that involve several settings, or settings of neighbours;
    - `notes(node)` yields lines that `explain` shows for the node, and so does `draw` with the focus on it;
    - `resume_impact(node, key)` returns what it means to resume with another value of a key, alone or with the reason
      as a tuple, or None;
    - `in_folder(settings, given, folder)` returns the settings with which a run uses the run folder that its recipe was
      read from; `given` are the keys that overlays or the command line set.

    The container calls `open()`, `close()` and `on_failure(error)` of objects that have them. It opens and closes other
    objects in the contexts that their `stage_context(stage, node)` returns. `run --dry-run` opens those with
    `preview()`, which returns what they say of a run before its first step. Before it opens the first node, it calls
    `check_machine()` of all that have it, as `check` does: it raises a UserError if this machine lacks a file or device
    that the settings name. It reads little, leaves nothing open, and uses other nodes only as they are before `open`.
    """

    def make(cls: type[T]) -> type[T]:
        # No slots, so that components may use cached_property; equality by identity, since fields hold tensors.
        made = attrs.define(cls, slots=False, eq=False, kw_only=True, repr=False)
        if "__repr__" not in vars(cls):
            made.__repr__ = _short_repr  # type: ignore[method-assign]
        flow = Flow(tuple(reads), tuple(writes), tuple(changes))
        made.__component__ = Traits(impact, flow, dict(needs or {}), opens_first)  # type: ignore[attr-defined]
        return made

    return make if cls is None else make(cls)


def _short_repr(self: Any) -> str:
    """The class and plain settings of a component: its edges lead to all of a run."""
    given = {field.name: getattr(self, field.name, None) for field in attrs.fields(type(self)) if field.init}
    plain = [f"{name}={value!r}" for name, value in given.items() if isinstance(value, str | int | float)]
    return f"{type(self).__name__}({', '.join(plain)})"


@dataclass_transform(kw_only_default=True, field_specifiers=(setting, wired, attrs.field))
def inherited(cls: type[T]) -> type[T]:
    """Let components inherit the fields of a class that is none itself."""
    return attrs.define(cls, slots=False, eq=False, kw_only=True)
