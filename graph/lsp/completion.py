"""What may be written at a position: nodes, keys, values, components, variables and bases."""

import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.graph.inspect.listing import find_roles, format_field
from drawloom.graph.inspect.serialize import serialize_value
from drawloom.graph.lsp.meaning import Meaning
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import KeyPath
from drawloom.graph.recipe.edits import EDIT, OPERATIONS
from drawloom.graph.recipe.layers import Leaf, Table
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.merged import DIRECTIVES, VARIABLE
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.toml.emit import dump_key, dumps
from drawloom.graph.types.describe import dump_or_repr, union_members
from drawloom.graph.types.port_match import implements
from drawloom.graph.wiring.node import format_path

Kind = Literal["node", "key", "value", "component", "variable", "recipe"]

NAME_LIKE = re.compile(r"[@$\w.*/-]*")
"""What a name may consist of: an open quote is followed by more, such as the rest of its line."""


@attrs.frozen
class Completion:
    """A text that may take the place of the token; `preferred` ones are listed first."""

    text: str
    kind: Kind
    doc: str = ""
    preferred: bool = True


def list_completions(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    """All that may be written in place of a token, whatever of it is typed."""
    if meaning.cursor.kind == "header":
        return _complete_headers(meaning)
    if meaning.cursor.kind == "key":
        return _complete_keys(meaning)
    return _complete_values(workspace, meaning)


def find_replaced_range(meaning: Meaning, offset: int) -> tuple[int, int]:
    """The range that a completion at an offset replaces."""
    cursor = meaning.cursor
    return cursor.start, cursor.end if NAME_LIKE.fullmatch(cursor.written) else offset


def _complete_headers(meaning: Meaning) -> Iterator[Completion]:
    """Tables of the recipe that this document does not have yet; in an edit, also lists."""
    path = meaning.cursor.path[:-1]
    is_edit = path[:1] == (EDIT,)
    table = _find_table(meaning, path[1:] if is_edit else path)
    own = () if is_edit else _list_own_keys(meaning, path)
    for name, item in table.items.items() if table else ():
        is_list = is_edit and isinstance(item, Leaf) and isinstance(item.value, list)
        if (isinstance(item, Table) and name not in own) or is_list:
            yield Completion(dump_key(name), "node", _describe_node(meaning, ".".join(map(str, (*path, name)))))
    if not path:
        known = {*own, *(table.items if table else ())} - {EDIT}  # which may have a table for each list
        yield from (Completion(name, "node") for name in ("vars", EDIT) if name not in known)


def _complete_keys(meaning: Meaning) -> Iterator[Completion]:
    path, inside = meaning.cursor.path[:-1], meaning.path[:-1]
    own = _list_own_keys(meaning, path)
    if path[:1] == (EDIT,):
        yield from _complete_edits(meaning, path)
    elif not path:
        yield from (Completion(name, "key") for name in DIRECTIVES if name not in (*own, "format", EDIT))
    elif meaning.spec and not inside:
        fields = [field for field in meaning.spec.fields.values() if format_field(field)]
        yield from (Completion(field.name, "key", format_field(field)) for field in fields if field.name not in own)
    elif meaning.field:
        kind = _find_type(meaning.field.type, inside[1:])
        found = [field for field in attrs.fields(kind) if field.init] if attrs.has(kind) else []
        yield from (
            Completion(field.alias or field.name, "key", field.metadata.get("doc", ""))
            for field in found
            if field.alias not in own
        )


def _complete_edits(meaning: Meaning, path: KeyPath) -> Iterator[Completion]:
    """The operations of an edit, and its anchors."""
    if path[-1] in OPERATIONS:
        yield from _complete_elements(meaning, path[1:-1])
    elif isinstance(_find_item(meaning, path[1:]), Leaf):
        yield from (Completion(name, "key") for name in OPERATIONS)


def _complete_elements(meaning: Meaning, path: KeyPath) -> Iterator[Completion]:
    """The elements of a list below, as `remove`, `before` and `after` name them."""
    leaf = _find_item(meaning, path)
    for element in _list_unedited(meaning, leaf) if isinstance(leaf, Leaf) else ():
        yield Completion(dumps(element), "node", _describe_node(meaning, element[1:]))


def _list_unedited(meaning: Meaning, leaf: Leaf) -> list[str]:
    """The strings of a list as it was before this document edited it."""
    below = leaf.overridden if leaf.layer is meaning.analysis.own and leaf.overridden else leaf
    return [element for element in below.value if isinstance(element, str)] if isinstance(below.value, list) else []


def _complete_values(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    path, field = meaning.cursor.path, meaning.field
    if path[-1] == "use":
        yield from _complete_components(workspace, meaning)
    elif path[0] == "extends":
        yield from _complete_bases(workspace, meaning.analysis.path)
    elif path[0] == "unset":
        recipe = meaning.graph.recipe
        names = dict.fromkeys([*recipe.tree.items, *recipe.nodes])
        yield from (Completion(dumps(name), "node", _describe_node(meaning, name)) for name in names)
    elif path[0] == EDIT and "remove" in path[-2:]:
        yield from _complete_elements(meaning, path[1 : -1 if path[-1] == "remove" else -2])
    elif field and field.is_edge:
        yield from _complete_nodes(meaning, field)
    elif field:
        yield from _complete_choices(field, meaning.path[1:])
        yield from _complete_variables(meaning)


def _complete_bases(workspace: Workspace, path: Path) -> Iterator[Completion]:
    """The shipped recipes, and the files beside a recipe."""
    beside = sorted(other.name for other in path.parent.glob("*.toml") if other.name != path.name)
    names = [*RecipeFolder(workspace.project.recipes).names, *beside]
    yield from (Completion(dumps(name), "recipe") for name in names)


def _complete_components(workspace: Workspace, meaning: Meaning) -> Iterator[Completion]:
    """Every component, first those that can be this node by the edges that lead to it, or to one of its name."""
    registry, path = workspace.project.registry, meaning.cursor.path[:-1]
    ports = meaning.field.ports if meaning.field and len(meaning.path) > 1 else ()
    fitting = [*find_roles(meaning.graph, format_path(path))]
    if (
        path and not ports and not fitting
    ):  # what is named here at the moment is no component, so that nothing leads to it
        fitting = [role for graph in workspace.shipped for role in find_roles(graph, str(path[0]))]
    for name in registry.names():
        found = registry.find(name)
        if isinstance(found, Spec):
            fits = all(role(found) for role in fitting) and (not ports or _implements_any(found, ports))
            yield Completion(dumps(name), "component", found.doc, preferred=fits)
        else:
            yield Completion(dumps(name), "component", found.text, preferred=False)


def _complete_nodes(meaning: Meaning, field: Field) -> Iterator[Completion]:
    """The nodes that an edge may lead to, and, in lists, groups of them."""
    graph = meaning.graph
    fitting = [name for name, node in graph.nodes.items() if not node.owner and _implements_any(node.spec, field.ports)]
    for name in fitting:
        if name != meaning.node:
            yield Completion(dumps(f"@{name}"), "node", _describe_node(meaning, name))
    if field.kind in ("list", "ordered"):
        groups = [name for name, members in graph.recipe.groups.items() if {*members} & {*fitting}]
        yield from (Completion(dumps(f"@{name}.*"), "node", "all nodes of the group") for name in groups)


def _complete_variables(meaning: Meaning) -> Iterator[Completion]:
    for name, leaf in meaning.graph.recipe.vars.items():
        yield Completion(dumps(f"{VARIABLE}{name}"), "variable", dumps(leaf.value), preferred=False)


def _complete_choices(field: Field, path: KeyPath) -> Iterator[Completion]:
    """The values of a type that has few, and the default."""
    found: dict[str, None] = {}
    for member in union_members(_find_type(field.type, path)):
        if typing.get_origin(member) is Literal:
            found |= dict.fromkeys(map(dumps, typing.get_args(member)))
        elif isinstance(member, type) and issubclass(member, Enum):
            found |= dict.fromkeys(dumps(choice.value) for choice in member)
        elif member is bool:
            found |= {"true": None, "false": None}
    default = None if path or field.required else serialize_value(field.default_value())
    shown = "" if default is None else dump_or_repr(default)
    found |= {shown: None} if shown else {}
    yield from (Completion(text, "value", "default" if text == shown else "") for text in found)


def _find_type(kind: Any, path: KeyPath) -> Any:
    """The type of a part of a value; Any if the type does not tell."""
    for step in path:
        for member in union_members(kind):
            inner = [each for each in typing.get_args(member) if each is not Ellipsis]
            if inner:  # an array has one type for all items or one for each, a table that of its keys and of its values
                kind = inner[min(step, len(inner) - 1) if isinstance(step, int) else -1]
                break
            if isinstance(step, str) and attrs.has(member):
                fields = {field.alias: field.type for field in attrs.fields(attrs.resolve_types(member))}
                kind = fields.get(step, Any)
                break
        else:
            return Any
    return next((member for member in union_members(kind) if attrs.has(member)), kind)


def _implements_any(spec: Spec, ports: Iterable[type]) -> bool:
    return any(implements(spec.cls, port) for port in ports)


def _describe_node(meaning: Meaning, name: str) -> str:
    node = meaning.graph.nodes.get(name)
    return f"{node.spec.use}: {node.spec.doc}" if node else ""


def _find_item(meaning: Meaning, path: KeyPath) -> Leaf | Table | None:
    """The merged value or table at a path."""
    item: Leaf | Table | None = meaning.graph.recipe.tree
    for step in path:
        item = item.items.get(str(step)) if isinstance(item, Table) else None
    return item


def _find_table(meaning: Meaning, path: KeyPath) -> Table | None:
    found = _find_item(meaning, path)
    return found if isinstance(found, Table) else None


def _list_own_keys(meaning: Meaning, path: KeyPath) -> Iterable[str]:
    """The keys that this document has at a path."""
    data: Any = meaning.analysis.own.data
    for step in path:
        try:
            data = data[step]
        except (LookupError, TypeError):
            return ()
    return data if isinstance(data, Mapping) else ()
