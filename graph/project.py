"""A project, its components and shipped recipes; and a recipe as Python and the command line use it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.drawing.draw import Format, draw
from drawloom.graph.inspect.changes import diff, resolve
from drawloom.graph.inspect.explain import explain
from drawloom.graph.inspect.serialize import serialize_recipe
from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError, UserError, did_you_mean
from drawloom.graph.recipe.layers import Layer, Leaf
from drawloom.graph.recipe.loading import RecipeFolder, read_bases, read_layers
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange, ResolvedRecipe
from drawloom.graph.recipe.merged import MergedRecipe, merge
from drawloom.graph.recipe.overrides import nest_values, read_overrides
from drawloom.graph.registry.imports import find_source
from drawloom.graph.registry.registry import Registry
from drawloom.graph.runtime.container import Container
from drawloom.graph.wiring.graph import Graph


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
        A project that also knows the components of these packages, or folders and files, which `--import` names.

        Raises UserError if one does not exist.
        """
        registry = self.registry
        for package in packages:
            try:
                registry = registry.with_source(find_source(package))
            except (LookupError, ImportError, ValueError) as error:
                raise UserError(f"--import {package}: {error}", exit_code=2) from error
        return attrs.evolve(self, registry=registry)

    def load(
        self,
        recipe: str,
        overlays: Sequence[str] = (),
        words: Sequence[str] = (),
        unsaved: Mapping[Path, str] | None = None,
    ) -> MergedRecipe:
        """
        A recipe by path or shipped name, with overlays and then `node.key=value` words merged over it.

        `unsaved` has texts that are read in place of files, by resolved path. Raises RecipeError if a file can't be
        read or is not TOML; other problems are in the recipe's `problems`.
        """
        values = read_overrides(words)
        layers = read_layers(recipe, overlays, RecipeFolder(self.recipes), unsaved)
        return merge(recipe, [*layers, Layer(str(COMMAND_LINE), values)])

    def in_its_folder(self, recipe: MergedRecipe) -> MergedRecipe:
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
                recipe = recipe.with_values(nest_values(name, values), recipe.source) if values else recipe
        return recipe

    def usual(self) -> dict[str, list[str]]:
        """The names of nodes in the shipped recipes, each with the components that it uses there."""
        found: dict[str, list[str]] = {}
        for name in RecipeFolder(self.recipes).names:
            for node, table in serialize_recipe(self.load(name)).items():
                uses = found.setdefault(node, [])
                uses += [] if table["use"] in uses else [table["use"]]
        return {node: uses for node, uses in found.items() if "." not in node}

    def shipped(self) -> Iterator[Graph]:
        """The graphs of the shipped recipes, with their problems: some are overlays."""
        return (self.graph(self.load(name), root="") for name in RecipeFolder(self.recipes).names)

    def graph(self, recipe: MergedRecipe, root: str | None = None) -> Graph:
        """The checked graph of a recipe, with its problems."""
        return Graph.of(recipe, self.registry, self.root if root is None else root)

    def container(
        self, graph: Graph, *roots: str, accept_changes: bool = False, given: Mapping[str, Any] | None = None
    ) -> Container:
        """
        A container for what the roots need, with objects `given` for some nodes.

        Raises RecipeError if the recipe has errors: with roots only those of the nodes that they need.
        """
        for name in roots:
            if name not in graph.nodes:
                graph.or_error()  # its table may be what is wrong
                hint = did_you_mean(name, graph.nodes)
                raise UserError(f"there is no node [{name}] to open; {hint}".rstrip("; "), exit_code=2)
        (graph.restricted_to(roots) if roots else graph).or_error()
        resolved = resolve(graph, accept_changes=accept_changes)
        return Container(graph, list(roots or (self.root,)), resolved, dict(given or {}))


@attrs.frozen(eq=False, repr=False)
class Recipe:
    """
    A recipe with everything that it extends: to be checked, explained, drawn, resolved, and opened as objects.

    It is immutable: `with_values` makes another. Nothing is built before `open`.
    """

    merged: MergedRecipe
    project: Project

    def __repr__(self) -> str:
        return f"<Recipe {self.merged.source}>"

    @classmethod
    def load(
        cls,
        name: str | Path,
        *values: str,
        overlays: str | Path | Sequence[str | Path] = (),
        imports: str | Sequence[str] = (),
        project: Project | None = None,
    ) -> "Recipe":
        """
        A recipe by path, shipped name or run folder, with overlays and then `values` merged over it.

        Values are written as on the command line: "optimizer.lr=1e-3". `imports` names packages, folders or files
        whose components may be used, too. One overlay or import need not be in a list. Raises RecipeError if a file
        can't be read or is not TOML.
        """
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise TypeError(f'{wrong[0]!r} is no value; write each as a string of its own, such as "optimizer.lr=1e-3"')
        project = (project or Project.of("drawloom")).importing([imports] if isinstance(imports, str) else imports)
        merged = [overlays] if isinstance(overlays, str | Path) else overlays
        return cls(project.load(str(name), [str(overlay) for overlay in merged], values), project)

    @classmethod
    def of(cls, data: Mapping[str, Any], source: str = "recipe", *, project: Project | None = None) -> "Recipe":
        """
        Return a recipe from nested dicts, as tomllib returns them: `{"extends": "first_run", "trainer": {"steps": 9}}`.

        They are read like a file at the path `source`, which problems name: `extends`, `unset` and `edit` work, and
        the path of a base is relative to its folder. Raises RecipeError if a base can't be read.
        """
        project = project or Project.of("drawloom")
        return cls(merge(source, read_bases(Layer(source, dict(data)), RecipeFolder(project.recipes))), project)

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Recipe":
        """
        Return another recipe: this one with the values of nested dicts merged over it, called `source` in problems.

        Values merge like an overlay: `{"trainer": {"steps": 9}}` sets one value, `{"unset": ["clip"]}` removes a node,
        `{"edit": {"trainer": {"phases": {"remove": "@clip"}}}}` edits a list. `extends` is a problem.
        """
        return attrs.evolve(self, merged=self.merged.with_values(data, source))

    @cached_property
    def graph(self) -> Graph:
        """Its nodes and edges, with all problems."""
        return self.project.graph(self.project.in_its_folder(self.merged))

    def check(self, *, elsewhere: bool = False) -> list[Problem]:
        """
        Check everything, as `drawloom check`, and return the warnings. Raises RecipeError with every error.

        `elsewhere` leaves out whether this machine has the files and devices that a run needs.
        """
        problems = [*self.graph.problems, *([] if elsewhere else self._lacks())]
        if errors := [problem for problem in problems if not problem.warning]:
            raise RecipeError(errors)
        return problems

    def _lacks(self) -> list[Problem]:
        """What this machine lacks for a run, as far as the nodes of the recipe are valid."""
        root = self.project.root
        valid = self.graph.valid_nodes([root]) if root in self.graph.nodes else []
        container = Container(self.graph, valid, ResolvedRecipe("", ""))
        container.build()
        return container.check_machine()

    def explain(self, target: str = "") -> str:
        """Where a value such as "optimizer.lr", a node, or the whole recipe comes from, and what is connected why."""
        return explain(self.graph.or_error(), target, self.project.root)

    def draw(self, format: Format = "tree", focus: str = "", *, step: bool = False) -> str:
        """What is built for a run, or around the node `focus`, as text; with `step`, the dataflow of one step."""
        title = Path(self.merged.source).stem
        return draw(self.graph.or_error(), title, self.project.root, format, focus, step=step)

    def resolved(self) -> str:
        """The resolved recipe as TOML: every setting and edge, each with where it comes from."""
        return resolve(self.graph.or_error()).text

    def preview(self) -> str:
        """
        What a run says before its first step, without the run: one text for each node with a method `preview`.

        Opens these nodes, all that would fill their `Every` fields, and what these need.
        """
        graph = self.graph.or_error()
        needed = graph.topological_order([self.project.root])
        speaking = [name for name in needed if hasattr(graph.nodes[name].spec.cls, "preview")]
        ports = {port for name in speaking for field in graph.nodes[name].spec.every_fields for port in field.ports}
        counted = [name for port in ports for name in graph.implementers(port) if name in needed]
        with self.open([*counted, *speaking]) as opened:
            return "\n".join(opened[name].preview() for name in speaking)

    def changes_since(self, old: "Recipe") -> list[RecipeChange]:
        """What differs from an older recipe or run to this one, and its impact on a run that resumes."""
        # Without a root: recipes of runs and parts of recipes are compared alike, and unused nodes count.
        return diff(old.merged, self.project.graph(self.merged, root=""))

    def open(
        self,
        only: str | Sequence[str] = (),
        given: Mapping[str, Any] | None = None,
        *,
        accept_changes: bool = False,
    ) -> Container:
        """
        A context manager that opens what a run needs, or the node or nodes `only` and what they need.

        Objects in `given` replace nodes by name. `accept_changes` resumes a run whose recipe has changed. Raises
        RecipeError if one of these nodes has errors, and TypeError if a given object does not implement the ports.
        """
        roots = [only] if isinstance(only, str) else only
        return self.project.container(self.graph, *roots, given=given, accept_changes=accept_changes)
