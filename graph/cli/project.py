"""Where a program's components and recipes are found, and the way from a recipe's name to a graph or container."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.build.graph import Graph
from drawloom.graph.inspect.serialize import serialize_recipe
from drawloom.graph.problems import UserError
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.recipe.resolving import resolve
from drawloom.graph.registry.registry import Registry
from drawloom.graph.runtime.container import Container


@attrs.frozen
class Project:
    """A catalogue of components, a folder of recipes, and the name of the node that a run is built for."""

    registry: Registry
    recipes: Path
    root: str = "trainer"

    @classmethod
    def of(cls, package: str) -> "Project":
        """The workshop of a package that holds the folders `components` and `recipes`."""
        catalogue = Registry.of(f"{package}.components")
        return cls(catalogue, catalogue.folder.parent / "recipes")

    def importing(self, packages: Sequence[str]) -> "Project":
        """
        A workshop that also knows the components below these packages, because whoever runs it says so.

        A UserError if there is no such package.
        """
        catalogue = self.registry
        for package in packages:
            try:
                catalogue = catalogue.with_package(package)
            except (LookupError, ImportError, ValueError) as error:
                raise UserError(f"--import {package}: {error}", exit_code=2) from error
        return attrs.evolve(self, registry=catalogue)

    def load(self, recipe: str, overlays: Sequence[str] = (), words: Sequence[str] = ()) -> Recipe:
        """A recipe with overlays and command-line words laid over it; a RecipeError if it can't be read."""
        return Recipe.load(recipe, overlays, words, recipes=self.recipes)

    def usual(self) -> dict[str, list[str]]:
        """The names of nodes in the recipes that stand here, with the components that they use."""
        found: dict[str, list[str]] = {}
        for name in RecipeFolder(self.recipes).names:
            for node, table in serialize_recipe(self.load(name)).items():
                uses = found.setdefault(node, [])
                uses += [] if table["use"] in uses else [table["use"]]
        return {node: uses for node, uses in found.items() if "." not in node}

    def graph(self, recipe: Recipe, root: str | None = None) -> Graph:
        """The graph of a recipe, checked; its problems are in it."""
        return Graph.of(recipe, self.registry, self.root if root is None else root)

    def container(
        self, graph: Graph, *roots: str, accept_changes: bool = False, given: Mapping[str, Any] | None = None
    ) -> Container:
        """A container for what the roots need, with objects `given` for some; a RecipeError if the graph has faults."""
        resolved = resolve(graph.or_error(), accept_changes=accept_changes)
        return Container(graph, list(roots or (self.root,)), resolved, dict(given or {}))
