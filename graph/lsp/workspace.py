"""
The recipes of an editor: their texts, saved or not, and their graphs as of the last successful parse.

A key or value in a recipe means a node, setting, edge, component, variable or base.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.graph.component import NAME
from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.problems import KeyPath, Problem, RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.layers import EDIT, STARTED_IN, Layer, Leaf, Table
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.merged import DIRECTIVES, VARIABLE, MergedRecipe
from drawloom.graph.registry.registry import Field, Spec
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import format_path

RECIPE_KEYS = {*DIRECTIVES, "vars"} - {"format", STARTED_IN}
"""Top-level keys that other TOML files do not have; many have a `format`."""

RECIPE_LINE = re.compile(r"^(use|extends)[ \t]*=[ \t]*[\"'\[]", re.MULTILINE)
"""A line that identifies a recipe while its text is not TOML."""

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
"""Problems that an overlay may have alone, but not merged over the intended recipe."""

SKIPPED_FOLDERS = {"node_modules", "site-packages", "__pycache__"}
"""Folders that are not searched for recipes, in addition to hidden folders."""

MAX_RECIPES = 2000
"""Recipes in a workspace that are searched for references; each takes about a millisecond."""


@attrs.frozen(eq=False)
class Analysis:
    """
    A recipe as of the last time its text was TOML.

    `own` is the document itself, without its bases. An overlay neither extends a recipe nor contains the root: the
    recipe it is meant for is unknown.
    """

    path: Path
    own: Layer
    graph: Graph
    is_overlay: bool


@attrs.define(eq=False, slots=False)
class Workspace:
    """
    The open documents by resolved path, and their analyses.

    Without `folders`, the workspace contains every document. As on the command line, recipe paths are relative to the
    current directory.
    """

    project: Project
    folders: tuple[Path, ...] = ()
    texts: dict[Path, str] = attrs.field(factory=dict)
    analyses: dict[Path, Analysis] = attrs.field(factory=dict)

    @cached_property
    def shipped_components_by_node(self) -> dict[str, list[str]]:
        """The node names in the shipped recipes, with the components used there."""
        return self.project.shipped_components_by_node()

    @cached_property
    def shipped_graphs(self) -> list[Graph]:
        """The graphs of the shipped recipes."""
        return [*self.project.shipped_graphs()]

    @cached_property
    def _top_level_names_in_shipped_recipes(self) -> set[str]:
        return {name for graph in self.shipped_graphs for name in graph.recipe.tree.items}

    def may_rename_in(self, path: Path) -> bool:
        """Return whether a file may be changed: it is open, or in a workspace folder where users write recipes."""
        relative_parts = [path.relative_to(folder).parts for folder in self.folders if path.is_relative_to(folder)]
        return path in self.texts or any(not any(map(_is_skipped_folder, parts)) for parts in relative_parts)

    def text(self, path: Path) -> str:
        """Return a file's text in the editor, or else on disk. Empty if it can't be read."""
        if path in self.texts:
            return self.texts[path]
        try:
            return path.read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            return ""

    def is_recipe(self, path: Path) -> bool:
        """
        Return whether a TOML file is a recipe in the workspace.

        It is judged by its nodes, its directives, or the node names of shipped recipes.
        """
        if self.folders and not any(path.is_relative_to(folder) for folder in self.folders):
            return False
        if path in self.analyses:
            return True
        text = self.text(path)
        try:
            data = tomli.loads(text)
        except (ValueError, RecursionError):
            return RECIPE_LINE.search(text) is not None
        return (
            any(map(_is_node, _iterate_possible_nodes(data)))
            or bool(RECIPE_KEYS & data.keys())
            or data.keys() <= self._top_level_names_in_shipped_recipes
        )

    def analyse_and_list_problems(self, path: Path) -> list[Problem]:
        """Analyse an open recipe, and return its problems. If it can't be read, the last analysis is kept."""
        try:
            recipe = self.project.load(os.path.relpath(path), unsaved=self.texts)
        except RecipeError as error:
            return error.problems
        own = next(layer for layer in recipe.layers if Path(layer.source).resolve() == path)
        is_overlay = "extends" not in own.data and self.project.root not in recipe.nodes
        graph = self.project.graph(recipe, root="" if is_overlay else None)
        self.analyses[path] = Analysis(path, own, graph, is_overlay)
        return [problem for problem in graph.problems if not (is_overlay and problem.code in NEEDS_BASE)]

    def get_last_analysis_or_empty(self, path: Path) -> Analysis:
        """Return an open recipe's last analysis, or an empty one if its text never was TOML."""
        if path in self.analyses:
            return self.analyses[path]
        empty = MergedRecipe.from_values({}, str(path))
        return Analysis(path, empty.layers[0], self.project.graph(empty, root=""), is_overlay=True)

    def list_open_dependents(self, path: Path) -> list[Path]:
        """Return the other open recipes extending a file, or without an analysis."""
        known = {other: self.analyses.get(other) for other in self.texts if other != path}
        return [
            other for other, analysis in known.items() if analysis is None or path in list_files(analysis.graph.recipe)
        ]

    def find_recipes(self) -> Iterator[Path]:
        """Yield the workspace's recipes, open or not, except lock files of runs."""
        paths = {*self.texts}
        for folder in self.folders:
            for root, folders, files in os.walk(folder):
                folders[:] = [name for name in folders if not _is_skipped_folder(name)]
                paths |= {Path(root, name).resolve() for name in files if name.endswith(".toml") and name != LOCK}
                if len(paths) > MAX_RECIPES:
                    break
        return (path for path in sorted(paths) if self.is_recipe(path))


def find_items(recipe: MergedRecipe, path: KeyPath) -> Mapping[str, Leaf | Table]:
    """Return the items by name in the merged table at a path; none if it is no table."""
    table: Leaf | Table | None = recipe.tree
    for step in path:
        table = table.items.get(str(step)) if isinstance(table, Table) else None
    return table.items if isinstance(table, Table) else {}


def list_files(recipe: MergedRecipe) -> set[Path]:
    """Return the files of a recipe and all its bases."""
    return {Path(layer.source).resolve() for layer in recipe.layers if layer.text is not None}


def _is_skipped_folder(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED_FOLDERS


def _iterate_possible_nodes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a recipe's possible nodes: top-level tables, and members of groups."""
    for table in data.values():
        if isinstance(table, dict):
            yield table
            yield from (member for member in table.values() if isinstance(member, dict))


def _is_node(table: dict[str, Any]) -> bool:
    use = table.get("use")
    return isinstance(use, str) and NAME.fullmatch(use) is not None


@attrs.frozen(eq=False)
class Meaning:
    """
    A position in a recipe with its node, and the path inside the node. In an edit, node and path of the edited list.

    `spec` is the component of the node. If only the base of an overlay contains the node, `spec` is the component used
    for it in shipped recipes.
    """

    cursor: Cursor
    analysis: Analysis
    node: str
    path: KeyPath
    spec: Spec | None

    @classmethod
    def from_cursor(cls, workspace: Workspace, analysis: Analysis, cursor: Cursor) -> "Meaning":
        """Return a token's meaning, based on the last successful analysis of the recipe."""
        path = cursor.path[1:] if cursor.path[:1] == (EDIT,) else cursor.path
        nodes = analysis.graph.nodes
        for length in range(len(path), 0, -1):
            if (name := format_path(path[:length])) in nodes:
                return cls(cursor, analysis, name, path[length:], nodes[name].spec)
        name = str(path[0]) if path else ""
        specs = [workspace.project.registry.find(use) for use in workspace.shipped_components_by_node.get(name, ())]
        spec = next((spec for spec in specs if isinstance(spec, Spec)), None)
        return cls(cursor, analysis, name if spec else "", path[1:] if spec else path, spec)

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def field(self) -> Field | None:
        """The setting or edge at the position."""
        return self.spec.fields.get(str(self.path[0])) if self.spec and self.path else None

    @property
    def use(self) -> str:
        """The name of the component at the position, or an empty string."""
        is_use = self.cursor.kind == "value" and self.cursor.path[-1:] == ("use",)
        return self.cursor.written if is_use else ""

    @property
    def reference_target(self) -> str:
        """The node or group named by the token, without "@" and ".*", or an empty string."""
        written = self.cursor.written
        return written[1:].removesuffix(".*") if self.cursor.quoted and written[:1] == "@" != written[1:2] else ""

    @property
    def variable(self) -> str:
        """The variable set or used at the position, or an empty string."""
        if self.cursor.path[:1] == ("vars",) and self.cursor.kind == "key":
            return self.cursor.written
        written = self.cursor.written if self.cursor.kind == "value" else ""
        return written.removeprefix(VARIABLE) if written.startswith(VARIABLE) else ""

    @property
    def extended_recipe_name(self) -> str:
        """The extended recipe at the position, or an empty string."""
        return self.cursor.written if self.cursor.kind == "value" and self.cursor.path[:1] == ("extends",) else ""
