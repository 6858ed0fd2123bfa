"""What a component is: an attrs class whose fields say what it needs (edges) and what it can be told (settings)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform, overload

import attrs

T = TypeVar("T")

Change = Literal["free", "semantic", "structural"]
Check = Callable[[Any], str | None]


def setting(
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    change: Change | None = None,
    check: Check | None = None,
    doc: str = "",
    alias: str | None = None,
) -> Any:
    """
    A field that a recipe sets.

    `change` says what it means to resume with another value: free (nothing that is learned depends on it), semantic
    (the run goes on, but is another run), structural (the saved state no longer fits); the component's own if left
    out. `check` takes the value and says why it can't be, or None. `alias` is the name in recipes and in the
    constructor, where the component offers a method or property of that name itself.
    """
    validator = None if check is None else _as_validator(check)
    default = attrs.Factory(factory) if factory is not None else default
    meta = {"change": change, "check": check, "doc": doc}
    return attrs.field(default=default, validator=validator, metadata=meta, alias=alias)


def _as_validator(check: Check) -> Callable[[Any, Any, Any], None]:
    def validate(_owner: Any, field: Any, value: Any) -> None:
        if reason := check(value):
            raise ValueError(f"{field.alias}: {reason}")

    return validate


@attrs.frozen
class Bound:
    """A check of a number, whose bounds others may read; None passes."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, value: Any) -> str | None:
        low = self.above if self.at_least is None else self.at_least
        if value is None or low is None:
            return None
        if self.below is not None:
            return None if low <= value < self.below else f"{value} is not in [{low}, {self.below})"
        if self.at_least is not None:
            return None if value >= low else f"{value} is less than {low}"
        return None if value > low else f"{value} is not above {low}"


def at_least(bound: float) -> Check:
    """A check: no less than `bound`."""
    return Bound(at_least=bound)


def above(bound: float) -> Check:
    """A check: more than `bound`."""
    return Bound(above=bound)


def between(low: float, high: float) -> Check:
    """A check: from `low` to below `high`."""
    return Bound(at_least=low, below=high)


@overload
def component(cls: type[T], /) -> type[T]: ...
@overload
def component(
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    changes: Sequence[str] = (),
    change: Change = "semantic",
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True, field_specifiers=(setting, attrs.field))
def component(
    cls: Any = None,
    /,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    changes: Sequence[str] = (),
    change: Change = "semantic",
) -> Any:
    """
    Make a class a component: an attrs class with keyword arguments, named in recipes by the path of its file.

    Members of a sequence edge say which values they read, write and change in place; a name that ends in "?" is read
    only if some member writes it. `change` is what it means to
    resume with this node added, removed, swapped or set otherwise: see `setting`.
    """

    def make(cls: type[T]) -> type[T]:
        made = attrs.define(cls, slots=False, eq=False, kw_only=True)
        made.__component__ = Traits(change, Flow(tuple(reads), tuple(writes), tuple(changes)))  # type: ignore[attr-defined]
        return made

    return make if cls is None else make(cls)


@attrs.frozen
class Flow:
    """What a member of a sequence does to the values that pass through it."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@attrs.frozen
class Traits:
    """What `@component` was told of a class."""

    change: Change
    flow: Flow
