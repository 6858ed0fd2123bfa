"""What a component is: an attrs class whose fields say what it needs (edges) and what it can be told (settings)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform, overload

import attrs

from drawloom.graph.setting import Change, setting

T = TypeVar("T")


@overload
def component(cls: type[T], /) -> type[T]: ...
@overload
def component(
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    changes: Sequence[str] = (),
    change: Change = "semantic",
    needs: Mapping[str, str] | None = None,
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
    needs: Mapping[str, str] | None = None,
) -> Any:
    """
    Make a class a component: an attrs class with keyword arguments, named in recipes by the path of its file.

    Members of a sequence edge say which values they read, write and change in place; a name that ends in "?" is read
    only if some member writes it. `change` is what it means to resume with this node added, removed, swapped or set
    otherwise: see `setting`. `needs` names modules that the component imports when it opens, each with what
    `pip install` takes: {"aim": "drawloom[aim]"}.

    What `check` asks a component, without building it, where it has these class methods:

    - `constraints(node)` yields problems that take more than one setting, or those of neighbours, to see;
    - `offers(node)` maps kinds to the names that settings anywhere in the graph may use;
    - `notes(node)` yields lines that `explain` shows of the node;
    - `weigh_change(node, key)` says what it means to resume with another value of a key, or None.
    """

    def make(cls: type[T]) -> type[T]:
        made = attrs.define(cls, slots=False, eq=False, kw_only=True)
        flow = Flow(tuple(reads), tuple(writes), tuple(changes))
        made.__component__ = Traits(change, flow, dict(needs or {}))  # type: ignore[attr-defined]
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
    needs: Mapping[str, str] = attrs.field(factory=dict)
