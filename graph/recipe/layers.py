"""Layers of a recipe: a tree of tables and leaves, where a leaf knows the values it overrides."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from drawloom.graph.problems import KeyPath, Position
from drawloom.graph.toml.positions import SourceMap

EDIT = "edit"
"""Top-level key of list edits."""

STARTED_IN = "started_in"
"""Top-level key of a lock file: the folder in which the run was started, for relative paths."""


@attrs.define(eq=False)
class Layer:
    """
    One source of values: a recipe file or, without text, the command line or values from Python.

    `label` names a shipped recipe independently of its installation: `pretrain.toml`. A base is a recipe that another
    recipe extends.
    """

    source: str
    data: dict[str, Any]
    text: str | None = None
    label: str = attrs.field(default=attrs.Factory(lambda self: self.source, takes_self=True))
    is_base: bool = attrs.field(default=False, kw_only=True)
    _source_map: SourceMap | None = attrs.field(default=None, init=False)

    @property
    def is_shipped(self) -> bool:
        """Whether it is a shipped recipe, with a label of its own."""
        return self.label != self.source

    @cached_property
    def folder(self) -> str:
        """
        The folder for relative paths, if it is not the current directory: the one in which a lock file's run started.

        Empty if it is the current directory, also in place of a folder that no longer exists, or is not the one of a
        lock file below the current directory: then the project was moved or copied.
        """
        started_in = self.data.get(STARTED_IN)
        if not isinstance(started_in, str) or not os.path.isdir(started_in):
            return ""
        lock, current, folder = (os.path.realpath(path) for path in (self.source, ".", started_in))
        is_copy = os.path.isfile(lock) and _contains(current, lock) and not _contains(folder, lock)
        return "" if is_copy or folder == current else started_in

    def key_position(self, path: KeyPath) -> Position:
        """Return the position where a value's key is written."""
        return self._find_position(path, lambda source_map: source_map.key_range(path))

    def value_position(self, path: KeyPath) -> Position:
        """Return the position of a value, or of the innermost table or array with a position around it."""
        return self._find_position(path, lambda source_map: source_map.value_range(path))

    def _find_position(self, path: KeyPath, find: "Callable[[SourceMap], Any]") -> Position:
        if self.text is None:
            return Position(self.source)
        if self._source_map is None:
            self._source_map = SourceMap(self.text)  # created late: most recipes have no problem and need no positions
        span = find(self._source_map) or self._source_map.nearest_range(path)
        line, column = self._source_map.line_and_column(span.start)
        return Position(self.source, line, column)


def _contains(folder: str, path: str) -> bool:
    return os.path.commonpath((folder, path)) == folder


class Origin(NamedTuple):
    """The layer with a value, and the value's path in this layer."""

    layer: Layer
    path: KeyPath

    @property
    def position(self) -> Position:
        """The value's position."""
        return self.layer.value_position(self.path)


@attrs.define(eq=False)
class Leaf:
    """
    A value other than a table, with its layer, table and key, and the leaf it overrides.

    `within` is the path of the table, shared by all its leaves, because a recipe has thousands of leaves. If an edit of
    the overridden list made the value, `elements` contains the origins of the elements, and `removed` the removed
    values.
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
        """The value's path in its layer."""
        return (*self.within, self.key)

    @property
    def position(self) -> Position:
        return self.layer.value_position(self.path)

    @property
    def key_position(self) -> Position:
        return self.layer.key_position(self.path)

    @property
    def position_label(self) -> str:
        """The position of the key, or of a list and its edits. Independent of where recipes are installed."""
        own = str(attrs.evolve(self.layer.key_position(self.path), source=self.layer.label))
        if self.elements is None or self.overridden is None:
            return own
        return f"{self.overridden.position_label} and {own}"

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin for a part of the value."""
        if self.elements is not None and path and path[0] in range(len(self.elements)):
            layer, start = self.elements[int(path[0])]
            return Origin(layer, (*start, *path[1:]))
        return Origin(self.layer, (*self.path, *path))

    def history(self) -> Iterator["Leaf"]:
        """Yield this leaf and all leaves it overrides, newest first."""
        leaf: Leaf | None = self
        while leaf is not None:
            yield leaf
            leaf = leaf.overridden


@attrs.define(eq=False)
class Table:
    """A merged table. `discarded` maps keys to their former component, for keys removed when `use` changed."""

    layer: Layer
    path: KeyPath
    items: "dict[str, Leaf | Table]" = attrs.field(factory=dict)
    discarded: Mapping[str, str] = MappingProxyType({})

    @property
    def position(self) -> Position:
        return self.layer.value_position(self.path)

    @property
    def position_label(self) -> str:
        """The table's position, independent of where shipped recipes are installed."""
        return str(attrs.evolve(self.layer.value_position(self.path), source=self.layer.label))

    def origin(self, path: KeyPath) -> Origin:
        """Return the table itself as the origin of a path that leads to none of its items."""
        return Origin(self.layer, (*self.path, *path))

    @property
    def use(self) -> Leaf | None:
        """The leaf naming this table's component, if the table is a node."""
        leaf = self.items.get("use")
        return leaf if isinstance(leaf, Leaf) else None

    def merge_layer(self, data: Mapping[str, Any], layer: Layer, path: KeyPath) -> None:
        """Merge a layer over this table: tables merge, other values replace, and another `use` discards settings."""
        if self.items:
            self._discard_settings_of_other_component(data.get("use"))
        items = self.items
        old_items = dict(items)  # usually empty: the recipe extends no other
        for key, value in data.items():
            old_item = old_items.get(key) if old_items else None
            if isinstance(value, dict):
                item_path = (*path, key)
                if not isinstance(old_item, Table):  # a table replaces a value, whose history ends here
                    old_item = items[key] = Table(layer, item_path)
                old_item.merge_layer(value, layer, item_path)
            else:
                overridden = None if old_item is None or isinstance(old_item, Table) else old_item
                items[key] = Leaf(value, layer, path, key, overridden)

    def _discard_settings_of_other_component(self, new_use: object) -> None:
        """
        If `new_use` names another component, remove all keys but `use`, and record which component they belonged to.
        """
        old_use = self.use
        # The settings of one component mean nothing to another.
        if new_use is None or old_use is None or old_use.value == new_use:
            return
        self.discarded = {**self.discarded, **{key: str(old_use.value) for key in self.items if key != "use"}}
        self.items = {"use": old_use}  # kept, because merge_layer makes it the history of the new `use`

    def remove(self, path: KeyPath) -> bool:
        """Remove a table or key. Return whether it existed."""
        *parents, last = path
        table: Leaf | Table | None = self
        for part in parents:
            table = table.items.get(str(part)) if isinstance(table, Table) else None
        return isinstance(table, Table) and table.items.pop(str(last), None) is not None

    def copy(self) -> "Table":
        """Return a deep copy sharing the immutable leaves."""
        items = {key: item.copy() if isinstance(item, Table) else item for key, item in self.items.items()}
        return Table(self.layer, self.path, items, self.discarded)

    @classmethod
    def from_values(cls, data: Mapping[str, Any], layer: Layer, path: KeyPath) -> "Table":
        """Make a table from plain values."""
        table = cls(layer, path)
        table.merge_layer(data, layer, path)
        return table


def iterate_leaves(item: Leaf | Table) -> Iterator[Leaf]:
    """Yield a leaf, or all leaves of a table."""
    stack: list[Leaf | Table] = [item]
    while stack:
        part = stack.pop()
        if isinstance(part, Leaf):
            yield part
        else:
            stack += reversed(part.items.values())


def locate_part(item: Leaf | Table, path: KeyPath, *, key: bool = False) -> Position:
    """Return the position of a part of a value, or of the innermost part with a position around it."""
    layer, whole = find_origin(item, path)
    return layer.key_position(whole) if key else layer.value_position(whole)


def find_origin(item: Leaf | Table, path: KeyPath) -> Origin:
    """Return the layer of a part of a value, and its path there."""
    while path and isinstance(item, Table) and path[0] in item.items:
        item, path = item.items[str(path[0])], path[1:]
    return item.origin(path)
