"""Settings of a node: substitute variables, remove escapes, and convert and check every value."""

import os
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.problems import COMMAND_LINE, KeyPath, Position, Problem, did_you_mean
from drawloom.graph.recipe.layers import Layer, Leaf, Table, find_origin
from drawloom.graph.recipe.merged import DIRECTIVES, VARIABLE, describe_missing_variable
from drawloom.graph.recipe.overrides import quote_override
from drawloom.graph.registry.registry import Field
from drawloom.graph.types.structure import CONVERTER
from drawloom.graph.wiring.node import Node, format_path

INVALID_VALUE = object()
"""Marker for a value with a problem, so that the problem is reported only once."""


@attrs.define(eq=False)
class SettingsResolver:
    """Resolver for the settings of nodes, with their recipe's variables, layers and folder for relative paths."""

    vars: dict[str, Leaf]
    folder: str = ""
    layers: Sequence[Layer] = ()

    def resolve(self, node: Node) -> None:
        """Fill in a node's settings. Invalid values become problems."""
        for choice in node.spec.settings:
            if choice.one_of and choice.name in node.table.items:
                self._drop_overridden_alternatives(node, choice)
        items = node.table.items
        for key, item in items.items():
            field = node.spec.fields.get(key)
            if field is not None and field.kind == "setting":
                self._convert_and_set_value(node, field, item)
            elif key != "use" and (field is None or not field.is_edge):
                self._report_unsettable_key(node, key, field)
        for field in node.spec.settings:
            if field.name not in items:
                self._set_default_or_report_missing(node, field)

    def _drop_overridden_alternatives(self, node: Node, field: Field) -> None:
        """Remove the settings that exclude this one from the node if earlier layers set them; report one beside it."""
        items = node.table.items
        order = {id(layer): number for number, layer in enumerate(self.layers)}
        layers = {
            other.name: order.get(id(items[other.name].layer), 0)
            for other in node.spec.settings
            if other.one_of == field.one_of and other.name in items
        }
        own = layers[field.name]
        dropped = [key for key, layer in layers.items() if layer < own]
        node.table = attrs.evolve(node.table, items={key: item for key, item in items.items() if key not in dropped})
        first = next(key for key, layer in layers.items() if layer == own)
        if first != field.name:
            text = f"both {first} and {field.name} are given"
            node.add_problem("DL303", text, "leave one of them out", (field.name,), key=True)

    def _report_unsettable_key(self, node: Node, key: str, field: Field | None) -> None:
        if field is not None:
            text = f"{key!r} is filled in by the container and can't be set"
            return node.add_problem("DL301", text, "remove it", (key,), key=True)
        owner = node.table.discarded.get(key)
        item = node.table.items.get(key)
        is_number = isinstance(item, Leaf) and isinstance(item.value, int | float)  # which no edge can be
        known = [
            name
            for name, field in node.spec.fields.items()
            if field.kind == "setting" or (field.is_edge and not is_number)
        ]
        hint = f"it belonged to {owner!r}, which this `use` replaces" if owner else did_you_mean(key, known)
        if line := node.spec.traits.replaced_keys.get(key):
            hint = f"write {line}"
        elif key in DIRECTIVES:
            hint = f"write {key} at the top of the file, before the first [table]"
        node.add_problem("DL302", f"{node.spec.use!r} has no setting or edge {key!a}", hint, (key,), key=True)

    def _convert_and_set_value(self, node: Node, field: Field, item: Leaf | Table) -> None:
        """Convert and check a setting's value, and set it on the node or report its problems."""
        plain = self.substitute_variables_and_unescape(node, item, (field.name,))
        if plain is INVALID_VALUE:
            return
        try:
            value, problems = CONVERTER.structure(plain, field.type)
            if not problems and field.check and (reason := field.check(value)):
                problems = [Problem("DL303", reason)]
        except Exception as error:  # a bug in the component's annotations or checks
            return node.add_component_bug(f"the setting {field.name!r} can't be read", error)
        for problem in problems:
            # A mistake in a variable is reported in [vars].
            path = (field.name, *problem.path)
            position = self._variable_position(item)
            written = f" ({item.value})" if position and isinstance(item, Leaf) else ""
            hint = _rewrite_hint_for_shell(problem.hint, node, path)
            node.add_problem(
                problem.code, f"{format_path(path)}{written}: {problem.text}", hint, path, position=position
            )
        if not problems:
            node.set_setting(field.name, value)
            if self.folder:
                self._join_paths(node, field, item, value)

    def _join_paths(self, node: Node, field: Field, item: Leaf | Table, value: Any) -> None:
        """Set a setting with relative paths below the folder of their layer, and as recorded for a lock file."""

        def get_layer_folder(path: KeyPath) -> str:
            return find_origin(item, path).layer.folder

        def get_folder_unless_recorded(path: KeyPath) -> str:
            folder = get_layer_folder(path)
            return "" if folder == self.folder else folder or os.getcwd()

        recorded = join_paths(value, get_folder_unless_recorded, globs=field.globs)
        node.set_setting(field.name, join_paths(value, get_layer_folder, globs=field.globs), recorded)

    def _variable_position(self, item: Leaf | Table) -> Position | None:
        """Return the variable's position if the whole value is a variable, or None."""
        name = item.value if isinstance(item, Leaf) and isinstance(item.value, str) else ""
        variable = self.vars.get(name.removeprefix(VARIABLE)) if name.startswith(VARIABLE) else None
        return variable.position if variable else None

    def _set_default_or_report_missing(self, node: Node, field: Field) -> None:
        if not field.required:
            node.set_setting(field.name, field.default_value())
            return
        from drawloom.graph.types.describe import describe_type, make_ellipsis_placeholder  # few recipes have problems

        text = f"{node.spec.use!r} needs the setting {field.name!r} ({describe_type(field.type)})"
        value = make_ellipsis_placeholder(field.type)
        hint = f"write {field.name} = {value}"
        if not node.owner:
            hint += f" in [{node.name}], or add {quote_override(f'{node.name}.{field.name}={value}')} to the command"
        node.add_problem("DL305", text, hint, ())

    def substitute_variables_and_unescape(self, node: Node, item: Any, path: KeyPath) -> Any:
        if isinstance(item, Leaf):
            item = item.value
        elif isinstance(item, Table):
            item = item.items
        if isinstance(item, str):
            return self._unescape_or_resolve_string(node, item, path) if item[:1] in ("@", "$") else item
        if isinstance(item, list):
            parts = [
                self.substitute_variables_and_unescape(node, part, (*path, number)) for number, part in enumerate(item)
            ]
            return INVALID_VALUE if any(part is INVALID_VALUE for part in parts) else parts
        if isinstance(item, dict):
            table = {
                key: self.substitute_variables_and_unescape(node, part, (*path, key)) for key, part in item.items()
            }
            return INVALID_VALUE if any(part is INVALID_VALUE for part in table.values()) else table
        return item

    def _unescape_or_resolve_string(self, node: Node, text: str, path: KeyPath) -> Any:
        """Return a string without its escape @@ or $$, or its variable's value; report other uses of @ and $."""
        if text[:2] in ("@@", "$$"):
            return text[1:]
        if text.startswith(VARIABLE):
            return self.resolve_variable(node, text, path)
        if text.startswith("@"):
            why = f"{format_path(path)} is a setting, not an edge, so it can't refer to a node with {text!r}"
        else:
            why = f"{text!r} is not a variable; a variable is written $vars.name and must be the whole value"
        node.add_problem("DL306", why, f'write "{text[0]}{text}" if you mean the text itself', path)
        return INVALID_VALUE

    def resolve_variable(self, node: Node, text: str, path: KeyPath) -> Any:
        """Return a variable's value, written `$vars.name`, or INVALID_VALUE if it does not exist."""
        leaf = self.vars.get(text.removeprefix(VARIABLE))
        if leaf is None:
            hint = describe_missing_variable(text.removeprefix(VARIABLE), self.vars)
            node.add_problem("DL307", f"there is no variable {text!r}", hint, path)
            return INVALID_VALUE
        return leaf.value


def _rewrite_hint_for_shell(hint: str, node: Node, path: KeyPath) -> str:
    """
    Return a hint `write [1, 2]` as `write 'node.key=[1, 2]'`, if the setting was written on the command line.

    Other hints are unchanged. The quotes keep a shell from splitting the array or expanding its brackets.
    """
    if not hint.startswith("write [") or path[1:] or node.position_of(path) != COMMAND_LINE:
        return hint
    value = hint.removeprefix("write ")
    return f"write {quote_override(f'{node.name}.{path[0]}={value}')}"


def join_paths(value: Any, get_folder: Callable[[KeyPath], str], *, globs: bool = False, path: KeyPath = ()) -> Any:
    """
    Return a setting's value with relative paths below the folder for their key path; unchanged below "".

    With `globs`, strings are paths or globs, except URLs.
    """

    def join_part(key: Any, part: Any) -> Any:
        return join_paths(part, get_folder, globs=globs, path=(*path, key))

    match value:
        case Path():
            return get_folder(path) / value if not value.is_absolute() and get_folder(path) else value
        case str() if globs and "://" not in value and (folder := get_folder(path)):
            return os.path.join(escape(folder), value)
        case list() | tuple():
            return type(value)(join_part(number, part) for number, part in enumerate(value))
        case Mapping():
            return {key: join_part(key, part) for key, part in value.items()}
        case _ if attrs.has(type(value)):
            fields = [field for field in attrs.fields(type(value)) if field.init]
            return attrs.evolve(
                value, **{field.alias: join_part(field.alias, getattr(value, field.name)) for field in fields}
            )
    return value
