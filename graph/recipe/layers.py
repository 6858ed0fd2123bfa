"""Recipes laid over one another: a tree of tables and leaves, each leaf on top of what it replaced."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph.problems import Place
from drawloom.graph.toml.positions import SourceMap

Path = tuple[str | int, ...]


@attrs.define(eq=False)
class Layer:
    """
    One source of values: a recipe file, or what has no text: the command line, and values made in Python.

    `label` names it where it has come from, wherever it is installed: `pretrain.toml`.
    """

    source: str
    data: dict[str, Any]
    text: str | None = None
    label: str = attrs.field(default=attrs.Factory(lambda self: self.source, takes_self=True))
    _places: SourceMap | None = attrs.field(default=None, init=False)

    def key(self, path: Path) -> Place:
        """Where the key of a value stands."""
        return self._place(path, lambda places: places.key(path))

    def value(self, path: Path) -> Place:
        """Where a value stands; of the nearest table or array around it when it has no place of its own."""
        return self._place(path, lambda places: places.value(path))

    def _place(self, path: Path, find: "Callable[[SourceMap], Any]") -> Place:
        if self.text is None:
            return Place(self.source)
        if self._places is None:
            self._places = SourceMap(self.text)
        span = find(self._places) or self._places.nearest(path)
        return Place(self.source, *self._places.position(span.start))


@attrs.define(eq=False)
class Leaf:
    """A value that is no table, with the layer and path that set it and what it replaced."""

    value: Any
    layer: Layer
    path: Path
    overridden: "Leaf | None" = None

    @property
    def place(self) -> Place:
        return self.layer.value(self.path)

    @property
    def key_place(self) -> Place:
        return self.layer.key(self.path)

    def history(self) -> Iterator["Leaf"]:
        """This leaf and those that it replaced, newest first."""
        leaf: Leaf | None = self
        while leaf is not None:
            yield leaf
            leaf = leaf.overridden


@attrs.define(eq=False)
class Table:
    """A merged table. `dropped` tells, for keys that went when `use` changed, whose they were."""

    layer: Layer
    path: Path
    items: "dict[str, Leaf | Table]" = attrs.field(factory=dict)
    discarded: dict[str, str] = attrs.field(factory=dict)

    @property
    def place(self) -> Place:
        return self.layer.value(self.path)

    @property
    def use(self) -> Leaf | None:
        """What names this table's component."""
        leaf = self.items.get("use")
        return leaf if isinstance(leaf, Leaf) else None

    def merge(self, data: Mapping[str, Any], layer: Layer, path: Path) -> None:
        """Lay a layer's table over this one: tables merge, all else replaces, a changed `use` clears what was."""
        self._clear_for(data.get("use"))
        for key, value in data.items():
            below = self.items.get(key)
            if isinstance(value, dict):
                if not isinstance(below, Table):
                    below = self.items[key] = Table(layer, (*path, key))
                below.merge(value, layer, (*path, key))
            else:
                self.items[key] = Leaf(value, layer, (*path, key), below if isinstance(below, Leaf) else None)

    def _clear_for(self, use: object) -> None:
        old = self.use
        if use is None or old is None or old.value == use:
            return
        self.discarded |= {key: str(old.value) for key in self.items if key != "use"}
        self.items = {"use": old}

    def remove(self, path: Path) -> bool:
        """Take a table or key away; whether it was there."""
        *parents, last = path
        table: Leaf | Table | None = self
        for part in parents:
            table = table.items.get(str(part)) if isinstance(table, Table) else None
        return isinstance(table, Table) and table.items.pop(str(last), None) is not None

    def copy(self) -> "Table":
        """A table of its own; leaves never change, so they are shared."""
        items = {key: item.copy() if isinstance(item, Table) else item for key, item in self.items.items()}
        return Table(self.layer, self.path, items, dict(self.discarded))

    @classmethod
    def of(cls, data: Mapping[str, Any], layer: Layer, path: Path) -> "Table":
        """A table from plain values."""
        table = cls(layer, path)
        table.merge(data, layer, path)
        return table


def locate(item: Leaf | Table, path: Path, *, key: bool = False) -> Place:
    """Where a part of a value stands, as deep as the text knows it."""
    while path and isinstance(item, Table) and path[0] in item.items:
        item, path = item.items[str(path[0])], path[1:]
    whole = (*item.path, *path)
    return item.layer.key(whole) if key else item.layer.value(whole)
