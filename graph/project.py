"""A project with its components and shipped recipes, and the recipe class of the Python API and the command line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.drawing import Format
from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError, UserError, did_you_mean
from drawloom.graph.recipe.layers import Layer, Leaf
from drawloom.graph.recipe.loading import RecipeFolder, read_bases_and_layer, read_layers
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange, ResolvedRecipe
from drawloom.graph.recipe.merged import MergedRecipe, merge_layers
from drawloom.graph.recipe.overrides import nest_values, read_overrides
from drawloom.graph.registry.registry import Registry
from drawloom.graph.runtime.container import Container
from drawloom.graph.wiring.graph import Graph


@attrs.frozen
class Project:
    """A registry of components, a folder of recipes, and the name of the root node of a run."""

    registry: Registry
    recipes: Path
    root: str = "trainer"

    @classmethod
    def from_package(cls, package: str) -> "Project":
        """Return a package's project, based on the folders `components` and `recipes`."""
        registry = Registry.from_package(f"{package}.components")
        return cls(registry, registry.folder.parent / "recipes")

    def with_imports(self, packages: Sequence[str]) -> "Project":
        """
        Return a project with additional components from these packages, folders or files, as with `--import`.

        Raises UserError if one does not exist.
        """
        registry = self.registry
        for package in packages:
            from drawloom.graph.registry.imports import find_source_and_extend_sys_path

            try:
                registry = attrs.evolve(registry, extra=(*registry.extra, find_source_and_extend_sys_path(package)))
            except (LookupError, ImportError, ValueError) as error:
                raise UserError(f"--import {package}: {error}", exit_code=2) from error
        return attrs.evolve(self, registry=registry)

    def load(
        self,
        recipe: str,
        overlays: Sequence[str] = (),
        overrides: Sequence[str] = (),
        unsaved: Mapping[Path, str] | None = None,
    ) -> MergedRecipe:
        """
        Load a recipe by path or shipped name, and merge overlays and then `node.key=value` overrides over it.

        `unsaved` maps resolved paths to texts replacing the files. Raises RecipeError if a file can't be read or is not
        TOML. Other problems are in the recipe's `problems`.
        """
        values = read_overrides(overrides)
        layers = read_layers(recipe, overlays, RecipeFolder(self.recipes), unsaved)
        return merge_layers(recipe, [*layers, Layer(str(COMMAND_LINE), values)])

    def adapt_to_moved_run_folder(self, recipe: MergedRecipe) -> MergedRecipe:
        """Return a recipe from a run folder with settings for this folder, wherever the folder was moved to."""
        lock = os.path.join(recipe.source, LOCK)
        if not os.path.isfile(lock):
            return recipe
        for name, table in recipe.nodes.items():
            leaves = {key: item for key, item in table.items.items() if isinstance(item, Leaf)}
            component = self.registry.find(str(leaves["use"].value)) if "use" in leaves else None
            if in_folder := getattr(getattr(component, "cls", None), "settings_to_stay_in_folder", None):
                written = [key for key, leaf in leaves.items() if leaf.layer.source != lock]
                values = in_folder({key: leaf.value for key, leaf in leaves.items()}, written, recipe.source)
                recipe = recipe.with_values(nest_values(name, values), recipe.source) if values else recipe
        return recipe

    def shipped_components_by_node(self) -> dict[str, list[str]]:
        """Return the node names in the shipped recipes, with the components used there."""
        uses: dict[str, dict[str, None]] = {}
        for graph in self.shipped_graphs():
            for name, node in graph.nodes.items():
                if "." not in name:
                    uses.setdefault(name, {})[node.spec.use] = None
        return {name: list(components) for name, components in uses.items()}

    def shipped_graphs(self) -> Iterator[Graph]:
        """Return the graphs of the shipped recipes, with their problems: some recipes are overlays."""
        return (self.graph(self.load(name), root="") for name in RecipeFolder(self.recipes).names)

    def graph(self, recipe: MergedRecipe, root: str | None = None) -> Graph:
        """Return a recipe's checked graph, with its problems."""
        return Graph.build(recipe, self.registry, self.root if root is None else root)

    def container(
        self, graph: Graph, *roots: str, accept_changes: bool = False, replacements: Mapping[str, Any] | None = None
    ) -> Container:
        """
        Return a container for the roots and their dependencies, with `replacements` for some nodes.

        With `accept_changes`, a run resumes even if its recipe has changed. Raises RecipeError if the recipe has
        errors. With roots, only errors of the needed nodes count.
        """
        for name in roots:
            if name not in graph.nodes:
                graph.require_valid()  # the problem may be its table
                hint = did_you_mean(name, graph.nodes)
                raise UserError(f"there is no node [{name}] to open; {hint}".rstrip("; "), exit_code=2)
        (graph.restrict_to(roots) if roots else graph).require_valid()
        resolved = self.resolve(graph, accept_changes=accept_changes)
        return Container(graph, list(roots or (self.root,)), resolved, dict(replacements or {}))

    def resolve(self, graph: Graph, *, accept_changes: bool = False) -> ResolvedRecipe:
        """Return a valid graph's resolved recipe."""
        from drawloom.graph.inspect.resolved import make_resolved_recipe  # a check resolves none

        return make_resolved_recipe(graph, accept_changes=accept_changes)


@attrs.frozen(eq=False, repr=False)
class Recipe:
    """
    A recipe with all its bases, to check, explain, draw, resolve, and open as objects.

    It is immutable: `with_values` returns another recipe. Nothing is built before `open`.
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
        Load a recipe by path, shipped name or run folder, and merge overlays and then `values` over it.

        Values are written as on the command line: "optimizer.lr=1e-3". `imports` names packages, folders or files with
        more components. A single overlay or import need not be in a list. Raises RecipeError if a file can't be read or
        is not TOML.
        """
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise TypeError(f'{wrong[0]!r} is not a string; write one string per value, such as "optimizer.lr=1e-3"')
        project = (project or Project.from_package("drawloom")).with_imports(
            [imports] if isinstance(imports, str) else imports
        )
        merged = [overlays] if isinstance(overlays, str | Path) else overlays
        return cls(project.load(str(name), [str(overlay) for overlay in merged], values), project)

    @classmethod
    def of(cls, data: Mapping[str, Any], source: str = "recipe", *, project: Project | None = None) -> "Recipe":
        """
        Return a recipe from nested dicts, as tomllib returns them: `{"extends": "first_run", "trainer": {"steps": 9}}`.

        The dicts are read like a file at the path `source`, which appears in problems: `extends`, `unset` and `edit`
        work, and the path of a base is relative to the folder of `source`. Raises RecipeError if a base can't be read.
        """
        project = project or Project.from_package("drawloom")
        return cls(
            merge_layers(source, read_bases_and_layer(Layer(source, dict(data)), RecipeFolder(project.recipes))),
            project,
        )

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Recipe":
        """
        Return a recipe with values from nested dicts merged over this one. Problems show `source` as their origin.

        Values merge like an overlay: `{"trainer": {"steps": 9}}` sets one value, `{"unset": ["clip"]}` removes a node,
        `{"edit": {"trainer": {"phases": {"remove": "@clip"}}}}` edits a list. `extends` is a problem.
        """
        return attrs.evolve(self, merged=self.merged.with_values(data, source))

    @cached_property
    def graph(self) -> Graph:
        """Its nodes and edges, with all problems."""
        return self.project.graph(self.project.adapt_to_moved_run_folder(self.merged))

    def check(self, *, skip_machine_checks: bool = False) -> list[Problem]:
        """
        Check the recipe like `drawloom check`, and return the warnings. Raises RecipeError with every error.

        `skip_machine_checks` skips the check for files and devices needed on this machine.
        """
        problems = [*self.graph.problems, *([] if skip_machine_checks else self._check_machine())]
        if errors := [problem for problem in problems if not problem.warning]:
            raise RecipeError(errors)
        return problems

    def _check_machine(self) -> list[Problem]:
        """Return what this machine lacks for a run, as far as the nodes of the recipe are valid."""
        root = self.project.root
        valid = self.graph.valid_nodes([root]) if root in self.graph.nodes else []
        container = Container(self.graph, valid, ResolvedRecipe("", ""))
        container.build()
        return container.check_before_open()

    def explain(self, target: str = "") -> str:
        """
        Explain a value such as "optimizer.lr", a node, or the whole recipe: where values come from, why nodes are
        connected.
        """
        from drawloom.graph.inspect.explain import explain  # for people, as the pictures below

        return explain(self.graph.require_valid(), target, self.project.root)

    def draw(self, format: Format = "tree", focus: str = "", *, step: bool = False) -> str:
        """
        Draw a run's nodes, or the surroundings of the node `focus`. With `step`, draw the dataflow in a training step.
        """
        from drawloom.graph.drawing.draw import draw  # other commands do without pictures

        title = Path(self.merged.source).stem
        return draw(self.graph.require_valid(), title, self.project.root, format, focus, step=step)

    def to_resolved_toml(self) -> str:
        """Return the resolved recipe as TOML: every setting and edge, with its origin in a comment."""
        return self.project.resolve(self.graph.require_valid()).text

    def preview(self) -> str:
        """
        Return a description of the run before its first step: one text per node with a method `preview`.

        Opens these nodes, the nodes for their `Every` fields, and all dependencies.
        """
        graph = self.graph.require_valid()
        needed = graph.topological_order([self.project.root])
        previewed = [name for name in needed if hasattr(graph.nodes[name].spec.cls, "preview")]
        ports = {
            port for name in previewed for field in graph.nodes[name].spec.fields_of_kind_every for port in field.ports
        }
        members = [name for port in ports for name in graph.implementers(port) if name in needed]
        with self.open([*members, *previewed]) as opened:
            return "\n".join(opened[name].preview() for name in previewed)

    def changes_since(self, old: "Recipe") -> list[RecipeChange]:
        """Return the differences from an older recipe or run to this one, with their impact on a resumed run."""
        from drawloom.graph.inspect.changes import diff

        # Without a root, so that partial recipes can be compared, and unused nodes count.
        return diff(old.merged, self.project.graph(self.merged, root=""))

    def open(
        self,
        only: str | Sequence[str] = (),
        replacements: Mapping[str, Any] | None = None,
        *,
        accept_changes: bool = False,
    ) -> Container:
        """
        Return a context manager for opening the nodes of a run, or the node or nodes `only` and their dependencies.

        `replacements` maps node names to objects replacing these nodes. `accept_changes` resumes a run even if its
        recipe has changed. Raises RecipeError if one of these nodes has errors, and TypeError if a replacement does not
        implement the node's ports.
        """
        roots = [only] if isinstance(only, str) else only
        return self.project.container(self.graph, *roots, replacements=replacements, accept_changes=accept_changes)
