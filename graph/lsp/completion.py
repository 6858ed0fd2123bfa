"""Completions at a position: nodes, keys, values, components, variables and bases."""

import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal

import attrs

from drawloom.graph.inspect.listing import find_replacement_conditions, format_field
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.lsp.workspace import Meaning, Workspace, find_items
from drawloom.graph.problems import KeyPath
from drawloom.graph.recipe.edits import OPERATIONS
from drawloom.graph.recipe.layers import EDIT, STARTED_IN, Leaf, Table
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.merged import DIRECTIVES, VARIABLE
from drawloom.graph.registry.registry import Field, Spec
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.graph.toml.positions import SourceRange
from drawloom.graph.types.assignable import union_members_except_none
from drawloom.graph.types.describe import dump_toml_or_repr
from drawloom.graph.types.port_match import implements_any
from drawloom.graph.wiring.node import format_path

Kind = Literal["node", "key", "value", "component", "variable", "recipe"]

NAME_LIKE = re.compile(r"[@$\w.*/-]*")
"""Characters of a name. An open quote may be followed by other text, such as the rest of its line."""


@attrs.frozen
class Completion:
    """A possible replacement for the token. Preferred completions are listed first."""

    text: str
    kind: Kind
    doc: str = ""
    preferred: bool = True


def list_completions(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    """Yield all possible replacements for a token, independent of the typed characters."""
    if meaning.cursor.kind == "header":
        return _complete_headers(meaning)
    if meaning.cursor.kind == "key":
        return _complete_keys(meaning)
    return _complete_values(workspace, meaning)


def find_replaced_range(meaning: Meaning, offset: int) -> SourceRange:
    """Return the range replaced by a completion at an offset."""
    cursor = meaning.cursor
    return SourceRange(cursor.start, cursor.end if NAME_LIKE.fullmatch(cursor.written) else offset)


def _complete_headers(meaning: Meaning) -> Iterator[Completion]:
    """Yield names for a header: the recipe's tables missing in this document, or in an edit all tables and lists."""
    path = meaning.cursor.path[:-1]
    is_edit = path[:1] == (EDIT,)
    items = find_items(meaning.graph.recipe, path[1:] if is_edit else path)
    own_keys = () if is_edit else _list_keys_in_document(meaning, path)
    for name, item in items.items():
        is_list = is_edit and isinstance(item, Leaf) and isinstance(item.value, list)
        if (isinstance(item, Table) and name not in own_keys) or is_list:
            yield Completion(dump_key(name), "node", _describe_node(meaning, ".".join(map(str, (*path, name)))))
    if not path:
        known = {*own_keys, *items} - {EDIT}  # an edit may have several tables
        yield from (Completion(name, "node") for name in ("vars", EDIT) if name not in known)


def _complete_keys(meaning: Meaning) -> Iterator[Completion]:
    path, inside = meaning.cursor.path[:-1], meaning.path[:-1]
    own_keys = _list_keys_in_document(meaning, path)
    if path[:1] == (EDIT,):
        yield from _complete_edits(meaning, path)
    elif not path:
        hidden = (*own_keys, "format", STARTED_IN, EDIT)
        yield from (Completion(name, "key") for name in DIRECTIVES if name not in hidden)
    elif meaning.spec and not inside:
        fields = [field for field in meaning.spec.fields.values() if format_field(field)]
        yield from (
            Completion(field.name, "key", format_field(field)) for field in fields if field.name not in own_keys
        )
    elif meaning.field:
        kind = _find_part_type(meaning.field.type, inside[1:])
        fields_of_class = [field for field in attrs.fields(kind) if field.init] if attrs.has(kind) else []
        yield from (
            Completion(field.alias or field.name, "key", field.metadata.get("doc", ""))
            for field in fields_of_class
            if field.alias not in own_keys
        )


def _complete_edits(meaning: Meaning, path: KeyPath) -> Iterator[Completion]:
    """Yield an edit's operations, and its anchors."""
    if path[-1] in OPERATIONS:
        yield from _complete_elements_of_edited_list(meaning, path[1:-1])
    elif _find_leaf(meaning, path[1:]):
        yield from (Completion(name, "key") for name in OPERATIONS)


def _complete_elements_of_edited_list(meaning: Meaning, path: KeyPath) -> Iterator[Completion]:
    """Yield elements for `remove`, `before` and `after` to name: the list's elements without this document's edits."""
    leaf = _find_leaf(meaning, path)
    if leaf and leaf.layer is meaning.analysis.own and leaf.overridden:
        leaf = leaf.overridden
    for element in leaf.value if leaf and isinstance(leaf.value, list) else ():
        if isinstance(element, str):
            yield Completion(dump_toml(element), "node", _describe_node(meaning, element[1:]))


def _complete_values(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    path, field = meaning.cursor.path, meaning.field
    if path[-1] == "use":
        yield from _complete_components(workspace, meaning)
    elif path[0] == "extends":
        file = meaning.analysis.path
        beside = sorted(other.name for other in file.parent.glob("*.toml") if other.name != file.name)
        names = [*RecipeFolder(workspace.project.recipes).names, *beside]
        yield from (Completion(dump_toml(name), "recipe") for name in names)
    elif path[0] == "unset":
        recipe = meaning.graph.recipe
        for name in dict.fromkeys([*recipe.tree.items, *recipe.nodes]):
            yield Completion(dump_toml(name), "node", _describe_node(meaning, name))
    elif path[0] == EDIT and "remove" in path[-2:]:
        yield from _complete_elements_of_edited_list(meaning, path[1 : -1 if path[-1] == "remove" else -2])
    elif field and field.is_edge:
        yield from _complete_nodes(meaning, field)
    elif field:
        yield from _complete_choices(field, meaning.path[1:])
        for name, leaf in meaning.graph.recipe.vars.items():
            yield Completion(dump_toml(f"{VARIABLE}{name}"), "variable", dump_toml(leaf.value), preferred=False)


def _complete_components(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    """Yield every component. Preferred are components fitting the edges to this node, or to a node with its name."""
    registry, path = workspace.project.registry, meaning.cursor.path[:-1]
    ports = meaning.field.ports if meaning.field and len(meaning.path) > 1 else ()
    required_roles = [*find_replacement_conditions(meaning.graph, format_path(path))]
    if (
        path and not ports and not required_roles
    ):  # what is named here at the moment is no component, so that nothing leads to it
        required_roles = [
            role for graph in workspace.shipped_graphs for role in find_replacement_conditions(graph, str(path[0]))
        ]
    for name in registry.names():
        spec = registry.find(name)
        if isinstance(spec, Spec):
            is_fitting = all(role(spec) for role in required_roles) and (not ports or implements_any(spec.cls, ports))
            yield Completion(dump_toml(name), "component", spec.summary, preferred=is_fitting)
        else:
            yield Completion(dump_toml(name), "component", spec.text, preferred=False)


def _complete_nodes(meaning: Meaning, field: Field) -> Iterator[Completion]:
    """Yield possible target nodes for an edge and, for a list, groups with such nodes."""
    graph = meaning.graph
    fitting = [
        name for name, node in graph.nodes.items() if not node.owner and implements_any(node.spec.cls, field.ports)
    ]
    for name in fitting:
        if name != meaning.node:
            yield Completion(dump_toml(f"@{name}"), "node", _describe_node(meaning, name))
    if field.kind in ("list", "ordered"):
        groups = [name for name, members in graph.recipe.groups.items() if {*members} & {*fitting}]
        yield from (Completion(dump_toml(f"@{name}.*"), "node", "all nodes of the group") for name in groups)


def _complete_choices(field: Field, path: KeyPath) -> Iterator[Completion]:
    """Yield a type's values if they are few, and the default."""
    choices: dict[str, None] = {}
    for member in union_members_except_none(_find_part_type(field.type, path)):
        if typing.get_origin(member) is Literal:
            choices |= dict.fromkeys(map(dump_toml, typing.get_args(member)))
        elif isinstance(member, type) and issubclass(member, Enum):
            choices |= dict.fromkeys(dump_toml(choice.value) for choice in member)
        elif member is bool:
            choices |= {"true": None, "false": None}
    default = None if path or field.required else convert_to_toml_types(field.default_value())
    default_text = "" if default is None else dump_toml_or_repr(default)
    choices |= {default_text: None} if default_text else {}
    yield from (Completion(text, "value", "default" if text == default_text else "") for text in choices)


def _find_part_type(value_type: Any, path: KeyPath) -> Any:
    """Return the type at `path` inside a value's type; for a union, its attrs class if it has one. Any if unknown."""
    for step in path:
        for member in union_members_except_none(value_type):
            # tuple[X, ...] and list[X] have one item type for all indices
            inner = [argument for argument in typing.get_args(member) if argument is not Ellipsis]
            if inner:  # item types of an array, or the key and value types of a table
                value_type = inner[min(step, len(inner) - 1) if isinstance(step, int) else -1]
                break
            if isinstance(step, str) and attrs.has(member):
                fields = {field.alias: field.type for field in attrs.fields(attrs.resolve_types(member))}
                value_type = fields.get(step, Any)
                break
        else:
            return Any
    return next((member for member in union_members_except_none(value_type) if attrs.has(member)), value_type)


def _describe_node(meaning: Meaning, name: str) -> str:
    node = meaning.graph.nodes.get(name)
    return f"{node.spec.use}: {node.spec.summary}" if node else ""


def _find_leaf(meaning: Meaning, path: KeyPath) -> Leaf | None:
    """Return the merged value at a path, or None."""
    item = find_items(meaning.graph.recipe, path[:-1]).get(str(path[-1])) if path else None
    return item if isinstance(item, Leaf) else None


def _list_keys_in_document(meaning: Meaning, path: KeyPath) -> Iterable[str]:
    """Return this document's keys at a path."""
    data: Any = meaning.analysis.own.data
    for step in path:
        try:
            data = data[step]
        except (LookupError, TypeError):
            return ()
    return data if isinstance(data, Mapping) else ()
