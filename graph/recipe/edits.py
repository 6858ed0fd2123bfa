"""
List edits: `[edit.trainer.phases]` removes elements of a list in the extended recipes, or inserts elements.

Removed elements and anchors are looked up in the list before the edit. So removing an anchor and inserting after it
replaces the anchor. Every element of the edited list keeps the position where it is written.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs

from drawloom.graph.problems import KeyPath, Problem, did_you_mean
from drawloom.graph.recipe.layers import EDIT, Layer, Leaf, Origin, Table
from drawloom.graph.toml.emit import dump_canonical, dump_toml

OPERATIONS = ("remove", "before", "after")

EXAMPLE = 'write remove = "@clip" or after."@clip" = "@lr"'


def apply_edits(top: Table, layer: Layer) -> Iterator[Problem]:
    """Apply a layer's edits to a recipe's lists, in place, and yield problems; their lists stay unchanged."""
    edits = layer.data.get(EDIT, {})
    if not isinstance(edits, dict):
        hint = "write [edit.trainer.phases]"
        yield Problem("DL117", "edit must contain a table per list", hint, position=layer.value_position((EDIT,)))
        return
    stack: list[tuple[Table, dict[str, Any], KeyPath]] = [(top, edits, (EDIT,))]
    while stack:
        table, edits_of_table, parents = stack.pop()
        for key, edit in edits_of_table.items():
            item, path = table.items.get(key), (*parents, key)
            if isinstance(item, Table) and isinstance(edit, dict):
                stack.append((item, edit, path))
            elif isinstance(item, Leaf) and isinstance(item.value, list):
                list_edit = _ListEdit(item, layer, path)
                list_edit.resolve_removals_and_insertions(edit)
                yield from list_edit.problems
                table.items[key] = item if list_edit.problems else list_edit.make_edited_leaf()
            else:
                yield _make_missing_list_problem(table, item, layer, path)


def _make_missing_list_problem(table: Table, item: Leaf | Table | None, layer: Layer, path: KeyPath) -> Problem:
    name, position = ".".join(map(str, path[1:])), layer.key_position(path)
    if item is None:
        hint = did_you_mean(str(path[-1]), table.items)
        return Problem("DL118", f"there is no list {name!r} to edit", hint, position=position)
    if isinstance(item, Table):
        return Problem("DL118", f"{name!r} is a table, not a list", "name a list in it", position=position)
    value = dump_toml(item.value)
    is_variable = isinstance(item.value, str) and item.value.startswith("$vars.")
    hint = f"write [edit.{item.value[1:]}]" if is_variable else f"replace it in [{name.rpartition('.')[0]}]"
    return Problem("DL118", f"{name!r} is {value}, not a list", hint, position=position)


@attrs.define(slots=False)
class _ListEdit:
    """Edit of one list. `before` and `after` map the index of an anchor to the elements inserted there."""

    old: Leaf
    layer: Layer
    path: KeyPath
    problems: list[Problem] = attrs.field(factory=list)
    removed: set[int] = attrs.field(factory=set)
    before: dict[int, list[tuple[Any, Origin]]] = attrs.field(factory=dict)
    after: dict[int, list[tuple[Any, Origin]]] = attrs.field(factory=dict)

    def resolve_removals_and_insertions(self, edit: Any) -> None:
        """Look up the removed elements and the anchors."""
        if not isinstance(edit, dict):
            self._add_problem("DL117", f"{self._dotted_path} must be a table with {', '.join(OPERATIONS)}", EXAMPLE, ())
            return
        for operation, value in edit.items():
            if operation == "remove":
                indices = _index_elements(map(dump_canonical, self.old.value))
                for element, path in _iterate_elements_or_value(value, ("remove",)):
                    self.removed |= {*self._find_index(dump_canonical(element), indices, path)}
            elif operation not in OPERATIONS:
                text = f"{self._dotted_path} has no operation {operation!a}"
                self._add_problem("DL117", text, did_you_mean(operation, OPERATIONS), (operation,))
            elif not isinstance(value, dict):
                text, hint = f"{self._dotted_path}.{operation} must be a table from anchors to elements", EXAMPLE
                self._add_problem("DL117", text, hint, (operation,))
            else:
                self._resolve_insertions(operation, value)

    def _resolve_insertions(self, operation: str, anchors: dict[str, Any]) -> None:
        """Find the anchors' indices, and record the elements inserted before or after them."""
        insertions = self.before if operation == "before" else self.after
        # TOML keys are strings: an anchor of another type, such as a number, is named by its TOML text.
        indices = _index_elements(
            element if isinstance(element, str) else dump_toml(element) for element in self.old.value
        )
        for anchor, value in anchors.items():
            inserted = [
                (element, Origin(self.layer, (*self.path, *path)))
                for element, path in _iterate_elements_or_value(value, (operation, anchor))
            ]
            for index in self._find_index(anchor, indices, (operation, anchor)):
                insertions[index] = inserted

    def _find_index(self, element: str, indices: dict[str, list[int]], path: KeyPath) -> Iterable[int]:
        """Return the only matching element's index. Report a problem if no element or several elements match."""
        matches = indices.get(element, [])
        if len(matches) == 1:
            return matches
        # `remove` compares TOML text, which already has quotes.
        text_of_element = element if path[0] == "remove" else dump_toml(element)
        if matches:
            text = (
                f"{self._dotted_path}: {text_of_element} is in the list {len(matches)} times, so the edit is ambiguous"
            )
            hint = "write the whole list instead of an edit"
        else:
            text = f"{self._dotted_path}: {text_of_element} is not in the list"
            hint = did_you_mean(element.strip('"'), self._string_elements)
        self._add_problem("DL119", text, hint, path)
        return ()

    @cached_property
    def _string_elements(self) -> list[str]:
        return list(dict.fromkeys(element for element in self.old.value if isinstance(element, str)))

    def make_edited_leaf(self) -> Leaf:
        """Return a leaf with the list after all removals and insertions; it overrides the leaf of the list before."""
        edited: list[tuple[Any, Origin]] = []
        for index, element in enumerate(self.old.value):
            unchanged = [] if index in self.removed else [(element, self.old.origin((index,)))]
            edited += [*self.before.get(index, ()), *unchanged, *self.after.get(index, ())]
        removed = [self.old.value[index] for index in sorted(self.removed)]
        values, origins = [value for value, _ in edited], tuple(origin for _, origin in edited)
        *above, key = self.path
        return Leaf(
            values,
            self.layer,
            within=tuple(above),
            key=str(key),
            overridden=self.old,
            elements=origins,
            removed=tuple(removed),
        )

    @property
    def _dotted_path(self) -> str:
        return ".".join(map(str, self.path))

    def _add_problem(self, code: str, text: str, hint: str, path: KeyPath) -> None:
        self.problems.append(Problem(code, text, hint, position=self.layer.value_position((*self.path, *path))))


def _index_elements(elements: Iterable[str]) -> dict[str, list[int]]:
    """Map every distinct element to all its indices in the list."""
    # A dict, because a list and its edit may have tens of thousands of elements.
    indices: dict[str, list[int]] = {}
    for index, element in enumerate(elements):
        indices.setdefault(element, []).append(index)
    return indices


def _iterate_elements_or_value(value: Any, path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    """Yield (element, path) for an array's elements. A value without an array counts as its only element."""
    if isinstance(value, list):
        yield from ((element, (*path, number)) for number, element in enumerate(value))
    else:
        yield value, path
