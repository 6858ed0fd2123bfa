"""The recipes that an editor shows: their texts, saved or not, and their graphs as of when they last could be read."""

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.layers import Layer
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.merged import DIRECTIVES, MergedRecipe
from drawloom.graph.registry.registry import NAME
from drawloom.graph.wiring.graph import Graph

RECIPE_KEYS = {*DIRECTIVES, "vars"} - {"format"}
"""Top-level keys that other TOML files do not have; many have a `format`."""

RECIPE_LINE = re.compile(r"^(use|extends)[ \t]*=[ \t]*[\"'\[]", re.MULTILINE)
"""A line that tells a recipe that is not TOML at the moment."""

NEEDS_BASE = {
    "DL109",  # nothing to unset
    "DL113",  # a table without `use`
    "DL114",  # a group with a table without `use`
    "DL116",  # an unused variable
    "DL118",  # no list to edit
    "DL305",  # a missing setting
    "DL307",  # an unknown variable
    "DL313",  # an unknown node
    "DL315",  # a missing edge
    "DL316",  # no node, or several, for an edge
}
"""Problems that an overlay may have by itself, and not over the recipe that it is merged over."""

SKIPPED_FOLDERS = {"node_modules", "site-packages", "__pycache__"}
"""Folders in which no recipes of the workspace are looked for, beside hidden ones."""

MAX_RECIPES = 2000
"""Recipes of a workspace that are searched for references; each takes about a millisecond."""


@attrs.frozen(eq=False)
class Analysis:
    """
    A recipe as of when its text last was TOML.

    `own` is the document itself, without what it extends. An overlay neither extends a recipe nor has the root: what it
    is merged over is not known.
    """

    path: Path
    own: Layer
    graph: Graph
    is_overlay: bool

    @property
    def files(self) -> set[Path]:
        """The recipe and all that it extends."""
        return {Path(layer.source).resolve() for layer in self.graph.recipe.layers if layer.text is not None}


@attrs.define(eq=False, slots=False)
class Workspace:
    """
    The open documents by resolved path, and what is known of each.

    Without `folders` every document is in the workspace. Paths of recipes, as on the command line, are relative to the
    current directory.
    """

    project: Project
    folders: tuple[Path, ...] = ()
    texts: dict[Path, str] = attrs.field(factory=dict)
    analyses: dict[Path, Analysis] = attrs.field(factory=dict)

    @cached_property
    def usual(self) -> dict[str, list[str]]:
        """The names of nodes in the shipped recipes, each with the components that it uses there."""
        return self.project.usual()

    @cached_property
    def shipped(self) -> list[Graph]:
        """The graphs of the shipped recipes."""
        return [*self.project.shipped()]

    @cached_property
    def _shipped_names(self) -> set[str]:
        names = RecipeFolder(self.project.recipes).names
        return {name for recipe in names for name in self.project.load(recipe).tree.items}

    def contains(self, path: Path) -> bool:
        """Whether a file is in the workspace."""
        return not self.folders or any(path.is_relative_to(folder) for folder in self.folders)

    def owns(self, path: Path) -> bool:
        """Whether a file may be changed: it is open, or in a folder of the workspace where people write recipes."""
        inside = [path.relative_to(folder).parts for folder in self.folders if path.is_relative_to(folder)]
        return path in self.texts or any(not any(map(_is_skipped, parts)) for parts in inside)

    def text(self, path: Path) -> str:
        """The text of a file: as it is in the editor, or else on disk; empty if it can't be read."""
        if path in self.texts:
            return self.texts[path]
        try:
            return path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            return ""

    def is_recipe(self, path: Path) -> bool:
        """Whether a TOML file is a recipe: by a node, a directive, or names of nodes that shipped recipes have."""
        if path in self.analyses:
            return True
        text = self.text(path)
        try:
            data = tomli.loads(text)
        except (ValueError, RecursionError):
            return RECIPE_LINE.search(text) is not None
        return (
            any(map(_is_node, _iterate_tables(data)))
            or bool(RECIPE_KEYS & data.keys())
            or data.keys() <= self._shipped_names
        )

    def check(self, path: Path) -> list[Problem]:
        """The problems of an open recipe; if it can't be read, what was known of it is kept."""
        try:
            recipe = self.project.load(os.path.relpath(path), unsaved=self.texts)
        except RecipeError as error:
            return error.problems
        own = next(layer for layer in recipe.layers if Path(layer.source).resolve() == path)
        is_overlay = "extends" not in own.data and self.project.root not in recipe.nodes
        graph = self.project.graph(recipe, root="" if is_overlay else None)
        self.analyses[path] = Analysis(path, own, graph, is_overlay)
        return [problem for problem in graph.problems if not (is_overlay and problem.code in NEEDS_BASE)]

    def known(self, path: Path) -> Analysis:
        """What is known of an open recipe: nothing, if its text never was TOML."""
        if path in self.analyses:
            return self.analyses[path]
        empty = MergedRecipe.of({}, str(path))
        return Analysis(path, empty.layers[0], self.project.graph(empty, root=""), is_overlay=True)

    def dependents(self, path: Path) -> list[Path]:
        """The other open recipes that extend a file, or of which nothing is known yet."""
        known = {other: self.analyses.get(other) for other in self.texts if other != path}
        return [other for other, analysis in known.items() if analysis is None or path in analysis.files]

    def recipes(self) -> Iterator[Path]:
        """The recipes of the workspace, open or not, without those that runs have written."""
        found = {path for path in self.texts if self.contains(path)}
        for folder in self.folders:
            for root, folders, files in os.walk(folder):
                folders[:] = [name for name in folders if not _is_skipped(name)]
                found |= {Path(root, name).resolve() for name in files if name.endswith(".toml") and name != LOCK}
                if len(found) > MAX_RECIPES:
                    break
        return (path for path in sorted(found) if self.is_recipe(path))


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED_FOLDERS


def _iterate_tables(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of a recipe that may be nodes: at the top, or members of a group."""
    for table in data.values():
        if isinstance(table, dict):
            yield table
            yield from (member for member in table.values() if isinstance(member, dict))


def _is_node(table: dict[str, Any]) -> bool:
    use = table.get("use")
    return isinstance(use, str) and NAME.fullmatch(use) is not None
