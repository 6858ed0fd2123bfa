"""
Find definitions, in an extended recipe or in the source of a component, and references.

The names of a node, group or variable are found in all recipes merged with each other, and renamed there.
"""

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.workspace import Meaning, Workspace, find_items, list_files
from drawloom.graph.problems import Position, RecipeError, UserError
from drawloom.graph.recipe.layers import EDIT, Leaf
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.merged import DIRECTIVES, NAME, VARIABLE, MergedRecipe
from drawloom.graph.registry.registry import Field, Spec
from drawloom.graph.toml.positions import SourceRange


def find_definitions(workspace: Workspace, meaning: Meaning) -> list[Position]:
    """
    Return the positions where a key or value is defined.

    A reference leads to its node or the members of its group, a variable to its value, `use` to the component, a base
    to its file. A node or key leads to the extended recipe with its value or, if there is none, to the component.
    """
    recipe, name = meaning.graph.recipe, meaning.reference_target
    if meaning.extended_recipe_name:
        return [*_locate_base(workspace, meaning.analysis.path, meaning.extended_recipe_name)]
    if meaning.use:
        spec = workspace.project.registry.find(meaning.use)
        return [locate_component(spec)] if isinstance(spec, Spec) else []
    if name:
        return [recipe.nodes[node].position for node in recipe.groups.get(name, [name]) if node in recipe.nodes]
    if meaning.variable:
        leaf = recipe.vars.get(meaning.variable)
        is_own_key = meaning.cursor.kind == "key"
        return (
            [*_locate_overridden_values(meaning, leaf)][:1] or ([leaf.key_position] if not is_own_key else [])
            if leaf
            else []
        )
    return [*_locate_node_or_key(meaning)][:1]


def _locate_node_or_key(meaning: Meaning) -> Iterator[Position]:
    """Yield the positions where an extended recipe sets a node or a key of it, and then the component."""
    table, field = meaning.graph.recipe.nodes.get(meaning.node), meaning.field
    if not meaning.path and table is not None and table.layer is not meaning.analysis.own:
        yield table.position
    leaf = table.items.get(str(meaning.path[0])) if table is not None and meaning.path else None
    if isinstance(leaf, Leaf):
        yield from _locate_overridden_values(meaning, leaf)
    if meaning.spec and not (meaning.path and field is None and meaning.path[0] != "use"):
        yield locate_field(meaning.spec, field) if field else locate_component(meaning.spec)


def _locate_overridden_values(meaning: Meaning, leaf: Leaf) -> Iterator[Position]:
    """Yield the positions where replaced values are written, newest first."""
    yield from (old.key_position for old in leaf.history() if old.layer is not meaning.analysis.own)


def _locate_base(workspace: Workspace, path: Path, name: str) -> Iterator[Position]:
    file = path.parent / name if name.endswith(".toml") else RecipeFolder(workspace.project.recipes).find(name)
    if file is not None and file.is_file():
        yield Position(str(file), 1, 1)


def locate_component(spec: Spec) -> Position:
    """Return the position where a component's class is defined."""
    lines, first = inspect.getsourcelines(spec.cls)
    index = next(number for number, line in enumerate(lines) if line.lstrip().startswith("class "))
    return Position(inspect.getsourcefile(spec.cls) or "", first + index, 1)


def locate_field(spec: Spec, field: Field) -> Position:
    """Return the position where a component's field is defined, in its class or a base class."""
    pattern = re.compile(rf"\s+{field.attribute}\s*:")
    for cls in spec.cls.__mro__:
        if field.attribute in inspect.get_annotations(cls):
            lines, first = inspect.getsourcelines(cls)
            index = next((number for number, line in enumerate(lines) if pattern.match(line)), 0)
            return Position(inspect.getsourcefile(cls) or "", first + index, 1)
    return locate_component(spec)


Symbol = tuple[str, ...]
"""The parts of a name: a node or group, such as ("metrics", "loss"), or a variable, such as ("vars", "length")."""


def find_symbol(meaning: Meaning, offset: int) -> Symbol | None:
    """Return the node, group or variable named at an offset, or None."""
    symbol, recipe = _read_symbol(meaning.cursor, offset), meaning.graph.recipe
    is_variable = symbol[:1] == ("vars",) and symbol[1:] and symbol[1] in recipe.vars
    is_node = ".".join(symbol) in {*recipe.nodes, *recipe.groups}
    return symbol if is_variable or is_node else None


def find_symbol_ranges(text: str, symbol: Symbol) -> Iterator[SourceRange]:
    """Yield the ranges where a text contains a name's last part: in headers, keys, references, edits and `unset`."""
    for match in re.finditer(rf"(?<![\w-]){re.escape(symbol[-1])}(?![\w-])", text):
        cursor = Cursor.at(text, match.start())
        if cursor and _read_symbol(cursor, match.start()) == symbol:
            yield SourceRange(match.start(), match.end())


def _read_symbol(cursor: Cursor, offset: int) -> Symbol:
    """Return a name's parts up to the part at an offset, or an empty tuple if the token is not a name."""
    written = cursor.written
    if cursor.quoted and written[:1] == "@":
        parts = written[1:].removesuffix(".*").split(".")
    elif cursor.kind == "value" and written.startswith(VARIABLE):
        parts = written[1:].split(".")
    elif cursor.kind == "value" and cursor.path[0] == "unset":
        parts = written.split(".")
    elif cursor.kind == "value":
        return ()
    else:
        return tuple(map(str, cursor.path[1:] if cursor.path[0] == EDIT else cursor.path))
    # Names have no escapes, so the token and its unquoted text have the same length.
    before = written[: max(offset - cursor.start - 1, 0)]
    return tuple(parts[: before.count(".") + 1])


@attrs.frozen
class References:
    """
    Files naming a symbol, and the recipes containing these files.

    `unread` lists unreadable recipes containing the name.
    """

    files: Mapping[Path, list[SourceRange]]
    recipes: list[MergedRecipe]
    unread: list[Path]

    @classmethod
    def find(cls, workspace: Workspace, path: Path, symbol: Symbol) -> "References":
        """Find all files naming a recipe's symbol: in its bases, in other recipes extending these, and so on."""
        recipes: dict[Path, MergedRecipe] = {}
        unread = []
        for other in dict.fromkeys((path, *workspace.find_recipes())):
            try:
                recipes[other] = workspace.project.load(os.path.relpath(other), unsaved=workspace.texts)
            except RecipeError:
                unread += [other] if symbol[-1] in workspace.text(other) else []
        layers = {other: list_files(recipe) for other, recipe in recipes.items()}
        named = {file: [*find_symbol_ranges(workspace.text(file), symbol)] for file in {path}.union(*layers.values())}
        shared_files, has_grown = {path}, True
        while has_grown:
            # Two recipes share a node if a file that names it is part of both.
            sharing = [other for other in layers if any(named[file] for file in layers[other] & shared_files)]
            added = {file for other in sharing for file in layers[other] if named[file]} - shared_files
            shared_files, has_grown = shared_files | added, bool(added)
        files = {file: named[file] for file in sorted(shared_files) if named[file]}
        return cls(files, [recipes[other] for other in layers if layers[other] & files.keys()], unread)


def find_rename_ranges(workspace: Workspace, path: Path, symbol: Symbol, new: str) -> Mapping[Path, list[SourceRange]]:
    """Return ranges for the new name by file. Raises UserError if the symbol can't be renamed to it."""
    old = ".".join(symbol)
    if old == workspace.project.root:
        raise UserError(f"[{old}] can't be renamed: a run starts from the node with this name")
    if len(symbol) == 1 and new in (*DIRECTIVES, "vars"):
        raise UserError(f"{new!r} can't be the name of a node: recipes reserve it; choose another name")
    if not NAME.fullmatch(new):
        raise UserError(f"{new!r} can't be the name of a node; use letters, digits, _ and -, a letter first")
    references = References.find(workspace, path, symbol)
    for file in references.files:
        if not workspace.may_rename_in(file):
            raise UserError(
                f"{old!r} can't be renamed: {os.path.relpath(file)} also names it, and is outside the workspace"
            )
    for file in references.unread:
        raise UserError(f"{old!r} can't be renamed: {os.path.relpath(file)} can't be read, but may name it")
    for recipe in references.recipes:
        if new in find_items(recipe, symbol[:-1]):
            raise UserError(f"{old!r} can't be renamed: {recipe.source} already has {'.'.join((*symbol[:-1], new))!r}")
    return references.files
