"""A project: its components and recipes, and the way from a recipe's name to a graph and a container."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.graph.build.graph import Graph
from drawloom.graph.inspect.changes import resolve
from drawloom.graph.inspect.serialize import serialize_recipe
from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError, UserError
from drawloom.graph.recipe.layers import Layer, Leaf
from drawloom.graph.recipe.loading import RecipeFolder, read_layers
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.recipe import Recipe, merge
from drawloom.graph.registry.registry import Registry
from drawloom.graph.runtime.container import Container


@attrs.frozen
class Project:
    """A registry of components, a folder of recipes, and the name of the node that a run is built for."""

    registry: Registry
    recipes: Path
    root: str = "trainer"

    @classmethod
    def of(cls, package: str) -> "Project":
        """The project of a package that holds the folders `components` and `recipes`."""
        registry = Registry.of(f"{package}.components")
        return cls(registry, registry.folder.parent / "recipes")

    def importing(self, packages: Sequence[str]) -> "Project":
        """
        A project that also knows the components of these packages, which `--import` names on the command line.

        Raises UserError if a package does not exist.
        """
        registry = self.registry
        for package in packages:
            try:
                registry = registry.with_package(package)
            except (LookupError, ImportError, ValueError) as error:
                raise UserError(f"--import {package}: {error}", exit_code=2) from error
        return attrs.evolve(self, registry=registry)

    def load(self, recipe: str, overlays: Sequence[str] = (), words: Sequence[str] = ()) -> Recipe:
        """
        A recipe by path or shipped name, with overlays and then `node.key=value` words merged over it.

        Raises RecipeError if a file can't be read or is not TOML; other problems are in the recipe's `problems`.
        """
        values = read_overrides(words)
        layers = read_layers(recipe, overlays, RecipeFolder(self.recipes))
        return merge(recipe, [*layers, Layer(str(COMMAND_LINE), values)])

    def in_its_folder(self, recipe: Recipe) -> Recipe:
        """A recipe that was read from a run folder as the recipe of a run there, wherever the folder was moved to."""
        lock = os.path.join(recipe.source, LOCK)
        if not os.path.isfile(lock):
            return recipe
        for name, table in recipe.nodes.items():
            leaves = {key: item for key, item in table.items.items() if isinstance(item, Leaf)}
            component = self.registry.find(str(leaves["use"].value)) if "use" in leaves else None
            if in_folder := getattr(getattr(component, "cls", None), "in_folder", None):
                given = [key for key, leaf in leaves.items() if leaf.layer.source != lock]
                values = in_folder({key: leaf.value for key, leaf in leaves.items()}, given, recipe.source)
                recipe = recipe.with_values(_nested(name, values), recipe.source) if values else recipe
        return recipe

    def usual(self) -> dict[str, list[str]]:
        """The names of nodes in the shipped recipes, each with the components that it uses there."""
        found: dict[str, list[str]] = {}
        for name in RecipeFolder(self.recipes).names:
            for node, table in serialize_recipe(self.load(name)).items():
                uses = found.setdefault(node, [])
                uses += [] if table["use"] in uses else [table["use"]]
        return {node: uses for node, uses in found.items() if "." not in node}

    def graph(self, recipe: Recipe, root: str | None = None) -> Graph:
        """The checked graph of a recipe, with its problems."""
        return Graph.of(recipe, self.registry, self.root if root is None else root)

    def container(
        self, graph: Graph, *roots: str, accept_changes: bool = False, given: Mapping[str, Any] | None = None
    ) -> Container:
        """A container for what the roots need, with objects `given` for some nodes. Raises RecipeError on errors."""
        resolved = resolve(graph.or_error(), accept_changes=accept_changes)
        return Container(graph, list(roots or (self.root,)), resolved, dict(given or {}))


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """
    Words of the form `node.key=value` as one table. Raises RecipeError with those that are not of this form.

    A value that is not TOML is a string: `kernels.rms_norm=eager`. From an "@" on, a key is the name of a node with its
    dots: `edit.report.metrics.after.@metrics.learning=@metrics.mine`.
    """
    tree: dict[str, Any] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        path, at, name = key.partition(".@")
        *tables, last = [*path.split("."), f"@{name}"] if at else path.split(".")
        # A key without a dot would set a whole node, which only an inline table can be.
        if not (equals and last and all(tables)) or not (tables or text.lstrip().startswith("{")):
            problems.append(_problem(f"{word!r} is not understood", "values are set by node.key=value"))
        elif isinstance(table := _table(tree, tables), str):
            problems.append(_problem(f"{key!r} goes into {table!r}, which is set to a value"))
        else:
            try:
                # A newline would let the text define further keys.
                table[last] = tomli.loads(f"x = {text}")["x"] if "\n" not in text else text
            except (tomli.TOMLDecodeError, RecursionError, ValueError):
                table[last] = text
    if problems:
        raise RecipeError(problems)
    return tree


def _table(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | str:
    """The table at a path, made if necessary; or the part of the path that is a value."""
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return part
    return tree


def _nested(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a node as a recipe has them: the node may be a member of a group."""
    for part in reversed(name.split(".")):
        values = {part: values}
    return values


def _problem(text: str, hint: str = "") -> Problem:
    return Problem("DL110", text, hint, place=COMMAND_LINE)
