"""A recipe of which a test opens a part."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.project import Project
from drawloom.graph.recipe import recipe as reading
from drawloom.graph.runtime.container import Container


@attrs.frozen
class Recipe:
    """A checked recipe; its graph does not change, other values make another."""

    graph: Graph
    workshop: Project

    @classmethod
    def load(cls, name: str, *, overlays: Sequence[str] = (), package: str = "drawloom") -> "Recipe":
        """A recipe by path or shipped name. Raises a RecipeError if it can't be read."""
        workshop = Project.of(package)
        return cls(workshop.graph(workshop.load(name, overlays), root=""), workshop)

    @classmethod
    def of(cls, data: Mapping[str, Any], *, package: str = "drawloom") -> "Recipe":
        """A recipe from plain values, as TOML would give them."""
        workshop = Project.of(package)
        return cls(workshop.graph(reading.Recipe.of(data, "test"), root=""), workshop)

    def with_values(self, data: Mapping[str, Any]) -> "Recipe":
        """Another recipe, with values laid over this one."""
        return attrs.evolve(self, graph=self.graph.with_values(data, "test"))

    def open(self, only: str = "", given: Mapping[str, Any] | None = None) -> Container:
        """
        A context manager that opens what the node `only` needs, or the root; objects `given` stand for nodes.

        Raises a RecipeError if the recipe has faults, a TypeError for what is given and does not fit.
        """
        return self.workshop.container(self.graph, only or self.workshop.root, given=given)
