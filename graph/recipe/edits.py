"""
List edits: `[edit.trainer.phases]` removes elements of a list that the recipes below write, or inserts others.

Removed elements and anchors are looked up in the list as it was before the edit, so that removing an anchor and
inserting after it replaces the anchor. Every element of the edited list keeps the position where it is written.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs

from drawloom.graph.problems import KeyPath, Problem, did_you_mean
from drawloom.graph.recipe.layers import Layer, Leaf, Origin, Table
from drawloom.graph.toml.emit import canonical, dumps

EDIT = "edit"
"""The top-level key of list edits."""

OPERATIONS = ("remove", "before", "after")

EXAMPLE = 'write remove = "@clip" or after."@clip" = "@lr"'


def apply_edits(top: Table, layer: Layer) -> Iterator[Problem]:
    """Apply a layer's edits to the lists of a recipe; a list whose edit has a problem stays as it was."""
    edits = layer.data.get(EDIT, {})
    if not isinstance(edits, dict):
        hint = "write [edit.trainer.phases]"
        yield Problem("DL117", "edit takes tables that are named by lists", hint, place=layer.value((EDIT,)))
        return
    stack: list[tuple[Table, dict[str, Any], KeyPath]] = [(top, edits, (EDIT,))]
    while stack:
        table, inside, above = stack.pop()
        for key, edit in inside.items():
            item, path = table.items.get(key), (*above, key)
            if isinstance(item, Table) and isinstance(edit, dict):
                stack.append((item, edit, path))
            elif isinstance(item, Leaf) and isinstance(item.value, list):
                edited = _ListEdit(item, layer, path)
                edited.read(edit)
                yield from edited.problems
                table.items[key] = item if edited.problems else edited.leaf()
            else:
                yield _no_list(table, item, layer, path)


def _no_list(table: Table, item: Leaf | Table | None, layer: Layer, path: KeyPath) -> Problem:
    name, place = ".".join(map(str, path[1:])), layer.key(path)
    if item is None:
        hint = did_you_mean(str(path[-1]), table.items)
        return Problem("DL118", f"there is no list {name!r} to edit", hint, place=place)
    if isinstance(item, Table):
        return Problem("DL118", f"{name!r} is a table, not a list", "name a list in it", place=place)
    value = dumps(item.value)
    is_variable = isinstance(item.value, str) and item.value.startswith("$vars.")
    hint = f"write [edit.{item.value[1:]}]" if is_variable else f"replace it in [{name.rpartition('.')[0]}]"
    return Problem("DL118", f"{name!r} is {value}, not a list", hint, place=place)


@attrs.define(slots=False)
class _ListEdit:
    """One edit of one list. `before` and `after` hold what is inserted there, by the index of the anchor."""

    old: Leaf
    layer: Layer
    path: KeyPath
    problems: list[Problem] = attrs.field(factory=list)
    removed: set[int] = attrs.field(factory=set)
    before: dict[int, list[tuple[Any, Origin]]] = attrs.field(factory=dict)
    after: dict[int, list[tuple[Any, Origin]]] = attrs.field(factory=dict)

    def read(self, edit: Any) -> None:
        """Look up the removed elements and the anchors."""
        if not isinstance(edit, dict):
            self._problem("DL117", f"{self._name} takes a table with {', '.join(OPERATIONS)}", EXAMPLE, ())
            return
        for operation, value in edit.items():
            if operation == "remove":
                self._remove(value)
            elif operation not in OPERATIONS:
                text = f"{self._name} has no operation {operation!a}"
                self._problem("DL117", text, did_you_mean(operation, OPERATIONS), (operation,))
            elif not isinstance(value, dict):
                text, hint = f"{self._name}.{operation} takes a table from anchors to elements", EXAMPLE
                self._problem("DL117", text, hint, (operation,))
            else:
                self._insert(operation, value)

    def _remove(self, value: Any) -> None:
        known = _indices(map(canonical, self.old.value))
        for wanted, path in _elements(value, ("remove",)):
            self.removed |= {*self._find(canonical(wanted), known, path)}

    def _insert(self, operation: str, anchors: dict[str, Any]) -> None:
        insertions = self.before if operation == "before" else self.after
        # Keys of TOML are strings: an anchor that is none, such as a number, is named by how TOML writes it.
        known = _indices(element if isinstance(element, str) else dumps(element) for element in self.old.value)
        for anchor, value in anchors.items():
            inserted = [
                (element, Origin(self.layer, (*self.path, *path)))
                for element, path in _elements(value, (operation, anchor))
            ]
            for index in self._find(anchor, known, (operation, anchor)):
                insertions[index] = inserted

    def _find(self, wanted: str, known: dict[str, list[int]], path: KeyPath) -> Iterable[int]:
        """The index of the one element that is wanted; a problem if there is none, or more than one."""
        found = known.get(wanted, [])
        if len(found) == 1:
            return found
        # `remove` compares TOML text, which already has quotes.
        shown = wanted if path[0] == "remove" else dumps(wanted)
        if found:
            text = f"{self._name}: {shown} is in the list {len(found)} times, so which one is meant is ambiguous"
            hint = "write the whole list instead of an edit"
        else:
            text = f"{self._name}: {shown} is not in the list"
            hint = did_you_mean(wanted.strip('"'), self._names)
        self._problem("DL119", text, hint, path)
        return ()

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(element for element in self.old.value if isinstance(element, str)))

    def leaf(self) -> Leaf:
        """The edited list, which overrides the old one."""
        new: list[tuple[Any, Origin]] = []
        for index, element in enumerate(self.old.value):
            kept = [] if index in self.removed else [(element, self.old.origin((index,)))]
            new += [*self.before.get(index, ()), *kept, *self.after.get(index, ())]
        removed = [self.old.value[index] for index in sorted(self.removed)]
        elements = [origin for _, origin in new]
        values, (*above, key) = [value for value, _ in new], self.path
        return Leaf(
            values,
            self.layer,
            tuple(above),
            str(key),
            overridden=self.old,
            elements=tuple(elements),
            removed=tuple(removed),
        )

    @property
    def _name(self) -> str:
        return ".".join(map(str, self.path))

    def _problem(self, code: str, text: str, hint: str, path: KeyPath) -> None:
        self.problems.append(Problem(code, text, hint, place=self.layer.value((*self.path, *path))))


def _indices(elements: Iterable[str]) -> dict[str, list[int]]:
    """The indices at which each element is found."""
    # A dict, since a recipe may have a list and an edit of tens of thousands of elements each.
    found: dict[str, list[int]] = {}
    for index, element in enumerate(elements):
        found.setdefault(element, []).append(index)
    return found


def _elements(value: Any, path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    """The elements of an array, or a value that is none as the only one; each with its path."""
    if isinstance(value, list):
        yield from ((element, (*path, number)) for number, element in enumerate(value))
    else:
        yield value, path
