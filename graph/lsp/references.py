"""Where a node, group or variable is named, in all recipes that are merged with each other; and its new name there."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.meaning import Meaning
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import RecipeError, UserError
from drawloom.graph.recipe.edits import EDIT
from drawloom.graph.recipe.layers import Table
from drawloom.graph.recipe.merged import DIRECTIVES, NAME, VARIABLE, MergedRecipe
from drawloom.graph.toml.positions import SourceRange

Symbol = tuple[str, ...]
"""A name by its parts: a node or group, such as ("metrics", "loss"), or a variable, such as ("vars", "length")."""


def symbol_at(meaning: Meaning, offset: int) -> Symbol | None:
    """The node, group or variable that is named at an offset; None if none is."""
    found, recipe = _named(meaning.cursor, offset), meaning.graph.recipe
    is_variable = found[:1] == ("vars",) and found[1:] and found[1] in recipe.vars
    is_node = ".".join(found) in {*recipe.nodes, *recipe.groups}
    return found if is_variable or is_node else None


def ranges(text: str, symbol: Symbol) -> Iterator[SourceRange]:
    """Where a text has the last part of a name: in headers, keys, references, edits and `unset`."""
    for found in re.finditer(rf"(?<![\w-]){re.escape(symbol[-1])}(?![\w-])", text):
        cursor = Cursor.at(text, found.start())
        if cursor and _named(cursor, found.start()) == symbol:
            yield SourceRange(found.start(), found.end())


def _named(cursor: Cursor, offset: int) -> Symbol:
    """The parts of a name up to that at an offset; empty if the token is no name."""
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
    # Names have no escapes, so that the token has as many letters as what is written.
    before = written[: max(offset - cursor.start - 1, 0)]
    return tuple(parts[: before.count(".") + 1])


@attrs.frozen
class References:
    """
    The files that name a symbol, and the recipes that they are part of.

    `unread` are recipes that could not be read, and have the name somewhere.
    """

    files: Mapping[Path, list[SourceRange]]
    recipes: list[MergedRecipe]
    unread: list[Path]

    @classmethod
    def of(cls, workspace: Workspace, path: Path, symbol: Symbol) -> "References":
        """All that names what this symbol is in a recipe: in what it extends, what extends that, and so on."""
        recipes: dict[Path, MergedRecipe] = {}
        unread = []
        for other in dict.fromkeys((path, *workspace.recipes())):
            try:
                recipes[other] = workspace.project.load(os.path.relpath(other), unsaved=workspace.texts)
            except RecipeError:
                unread += [other] if symbol[-1] in workspace.text(other) else []
        layers = {other: _files(recipe) for other, recipe in recipes.items()}
        named = {file: [*ranges(workspace.text(file), symbol)] for file in {path}.union(*layers.values())}
        family, grown = {path}, True
        while grown:
            # Two recipes mean the same node if some file that names it is part of both.
            shared = [other for other in layers if any(named[file] for file in layers[other] & family)]
            more = {file for other in shared for file in layers[other] if named[file]} - family
            family, grown = family | more, bool(more)
        files = {file: named[file] for file in sorted(family) if named[file]}
        return cls(files, [recipes[other] for other in layers if layers[other] & files.keys()], unread)


def _files(recipe: MergedRecipe) -> set[Path]:
    return {Path(layer.source).resolve() for layer in recipe.layers if layer.text is not None}


def rename(workspace: Workspace, path: Path, symbol: Symbol, new: str) -> Mapping[Path, list[SourceRange]]:
    """Where the new name goes, by file. Raises UserError if the symbol can't be renamed, or not to this name."""
    old = ".".join(symbol)
    if old == workspace.project.root:
        raise UserError(f"[{old}] can't be renamed: a run is built for the node of this name")
    if not NAME.fullmatch(new) or (len(symbol) == 1 and new in (*DIRECTIVES, "vars")):
        raise UserError(f"{new!r} can't be the name of a node; use letters, digits, _ and -, a letter first")
    found = References.of(workspace, path, symbol)
    for file in found.files:
        if not workspace.owns(file):
            raise UserError(f"{old!r} can't be renamed: {os.path.relpath(file)} names it, and is not in the workspace")
    for file in found.unread:
        raise UserError(f"{old!r} can't be renamed: {os.path.relpath(file)} can't be read, and may name it")
    for recipe in found.recipes:
        if new in _siblings(recipe, symbol):
            raise UserError(f"{old!r} can't be renamed: {recipe.source} has {'.'.join((*symbol[:-1], new))!r} already")
    return found.files


def _siblings(recipe: MergedRecipe, symbol: Symbol) -> Mapping[str, object]:
    """What is beside a symbol in a recipe, by name."""
    item: object = recipe.tree
    for part in symbol[:-1]:
        item = item.items.get(part) if isinstance(item, Table) else None
    return item.items if isinstance(item, Table) else {}
