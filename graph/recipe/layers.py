"""Recipes merged over one another: a tree of tables and leaves, each leaf with the values that it overrides."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from drawloom.graph.problems import KeyPath, Place
from drawloom.graph.toml.positions import SourceMap


@attrs.define(eq=False)
class Layer:
    """
    One source of values: a recipe file or, without text, the command line or values from Python.

    `label` names a shipped recipe independently of where it is installed: `pretrain.toml`. A base is a recipe that
    another one extends.
    """

    source: str
    data: dict[str, Any]
    text: str | None = None
    label: str = attrs.field(default=attrs.Factory(lambda self: self.source, takes_self=True))
    is_base: bool = attrs.field(default=False, kw_only=True)
    _places: SourceMap | None = attrs.field(default=None, init=False)

    @property
    def is_shipped(self) -> bool:
        """Whether it is a shipped recipe, which has a label of its own."""
        return self.label != self.source

    def key(self, path: KeyPath) -> Place:
        """The position of the key of a value."""
        return self._place(path, lambda places: places.key(path))

    def value(self, path: KeyPath) -> Place:
        """The position of a value, or of the innermost table or array around it that has one."""
        return self._place(path, lambda places: places.value(path))

    def _place(self, path: KeyPath, find: "Callable[[SourceMap], Any]") -> Place:
        if self.text is None:
            return Place(self.source)
        if self._places is None:
            self._places = SourceMap(self.text)  # only now: most recipes have no problem and need no positions
        span = find(self._places) or self._places.nearest(path)
        line, column = self._places.position(span.start)
        return Place(self.source, line, column)


class Origin(NamedTuple):
    """The layer that wrote a value, and the path of the value in that layer."""

    layer: Layer
    path: KeyPath

    @property
    def place(self) -> Place:
        """The position of the value."""
        return self.layer.value(self.path)


@attrs.define(eq=False)
class Leaf:
    """
    A value that is not a table, with the layer, table and key that set it and the leaf that it overrides.

    `within` is the path of the table, which all its leaves share: a recipe has thousands of leaves.
    If the value is a list that was made by editing the overridden one, `elements` has the origin of each element, and
    `removed` what the edit removed.
    """

    value: Any
    layer: Layer
    within: KeyPath
    key: str
    overridden: "Leaf | None" = None
    elements: tuple[Origin, ...] | None = None
    removed: tuple[Any, ...] = ()

    @property
    def path(self) -> KeyPath:
        """The path of the value in its layer."""
        return (*self.within, self.key)

    @property
    def place(self) -> Place:
        return self.layer.value(self.path)

    @property
    def key_place(self) -> Place:
        return self.layer.key(self.path)

    @property
    def label(self) -> str:
        """The position of the key, or those of a list and its edits; the same wherever recipes are installed."""
        own = str(attrs.evolve(self.layer.key(self.path), source=self.layer.label))
        return own if self.elements is None or self.overridden is None else f"{self.overridden.label} and {own}"

    def origin(self, path: KeyPath) -> Origin:
        """The origin of a part of the value."""
        if self.elements is not None and path and path[0] in range(len(self.elements)):
            layer, start = self.elements[int(path[0])]
            return Origin(layer, (*start, *path[1:]))
        return Origin(self.layer, (*self.path, *path))

    def history(self) -> Iterator["Leaf"]:
        """This leaf and those that it overrides, newest first."""
        leaf: Leaf | None = self
        while leaf is not None:
            yield leaf
            leaf = leaf.overridden


@attrs.define(eq=False)
class Table:
    """A merged table. `discarded` maps keys that were removed when `use` changed to the component they belonged to."""

    layer: Layer
    path: KeyPath
    items: "dict[str, Leaf | Table]" = attrs.field(factory=dict)
    discarded: Mapping[str, str] = MappingProxyType({})

    @property
    def place(self) -> Place:
        return self.layer.value(self.path)

    @property
    def label(self) -> str:
        """The position of the table, the same wherever shipped recipes are installed."""
        return str(attrs.evolve(self.layer.value(self.path), source=self.layer.label))

    def origin(self, path: KeyPath) -> Origin:
        """The origin of a part that no item of the table holds."""
        return Origin(self.layer, (*self.path, *path))

    @property
    def use(self) -> Leaf | None:
        """The leaf that names this table's component, if it is a node."""
        leaf = self.items.get("use")
        return leaf if isinstance(leaf, Leaf) else None

    def merge(self, data: Mapping[str, Any], layer: Layer, path: KeyPath) -> None:
        """Merge a layer over this table: tables merge, other values replace, a changed `use` discards settings."""
        if self.items:
            self._clear_for(data.get("use"))
        items = self.items
        known = dict(items)  # mostly empty: a table of a recipe that extends no other
        for key, value in data.items():
            below = known.get(key) if known else None
            if isinstance(value, dict):
                where = (*path, key)
                if not isinstance(below, Table):  # a table replaces a value, whose history ends here
                    below = items[key] = Table(layer, where)
                below.merge(value, layer, where)
            else:
                before = None if below is None or isinstance(below, Table) else below
                items[key] = Leaf(value, layer, path, key, before)

    def _clear_for(self, use: object) -> None:
        old = self.use
        # The settings of one component mean nothing to another.
        if use is None or old is None or old.value == use:
            return
        self.discarded = {**self.discarded, **{key: str(old.value) for key in self.items if key != "use"}}
        self.items = {"use": old}

    def remove(self, path: KeyPath) -> bool:
        """Remove a table or key; returns whether it was there."""
        *parents, last = path
        table: Leaf | Table | None = self
        for part in parents:
            table = table.items.get(str(part)) if isinstance(table, Table) else None
        return isinstance(table, Table) and table.items.pop(str(last), None) is not None

    def copy(self) -> "Table":
        """A deep copy, which shares the immutable leaves."""
        items = {key: item.copy() if isinstance(item, Table) else item for key, item in self.items.items()}
        return Table(self.layer, self.path, items, self.discarded)

    @classmethod
    def of(cls, data: Mapping[str, Any], layer: Layer, path: KeyPath) -> "Table":
        """A table from plain values."""
        table = cls(layer, path)
        table.merge(data, layer, path)
        return table


def leaves(item: Leaf | Table) -> Iterator[Leaf]:
    """A leaf, or all leaves of a table."""
    stack: list[Leaf | Table] = [item]
    while stack:
        part = stack.pop()
        if isinstance(part, Leaf):
            yield part
        else:
            stack += reversed(part.items.values())


def locate(item: Leaf | Table, path: KeyPath, *, key: bool = False) -> Place:
    """The position of a part of a value, or of the innermost part around it that has one."""
    while path and isinstance(item, Table) and path[0] in item.items:
        item, path = item.items[str(path[0])], path[1:]
    layer, whole = item.origin(path)
    return layer.key(whole) if key else layer.value(whole)
