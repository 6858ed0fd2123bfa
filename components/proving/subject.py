"""Subjects of proofs: a component in its smallest recipe, or a recipe with the smallest sizes."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom import RecipeError, UserError
from drawloom.components.proving.run import ProofSource
from drawloom.components.proving.smallest import (
    BASE,
    REWARD,
    find_node_and_changes,
    make_component_recipe,
    make_reproducible_values,
    make_reward_values,
    merge_values,
    shrink_recipe,
)
from drawloom.graph.project import Project
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.types.port_match import implements
from drawloom.ports import Reward

OWN = "drawloom.components"


@attrs.frozen
class Subject:
    """
    A component's or a recipe's name, with the words, overlays and imports of a command.

    `nodes` are a recipe's nodes with contracts to check; default: nodes with foreign components.
    """

    name: str
    words: Sequence[str] = ()
    overlays: Sequence[str] = ()
    imports: Sequence[str] = ()
    nodes: Sequence[str] = ()

    @classmethod
    def of_class(cls, component: type, words: Sequence[str]) -> "Subject":
        """Return the subject for a component class in a package, or in a file of its own."""
        module, file = component.__module__, inspect.getfile(component)
        if module.startswith(f"{OWN}."):
            return cls(module.removeprefix(f"{OWN}."), words)
        package = module.partition(".")[0]
        return cls(module, words, imports=[package if package != module else file])

    def make_source_values_and_nodes(self, folder: Path) -> tuple[ProofSource, dict[str, Any], list[str]]:
        """
        Return the recipe, values for all its runs, and the nodes with contracts to check.

        Files for the recipe are written into the folder. Raises UserError or RecipeError.
        """
        project = Project.from_package("drawloom").with_imports(self.imports)
        common: dict[str, Any] = {"words": self.words, "overlays": self.overlays, "imports": self.imports}
        is_recipe = self._is_recipe(project)
        if self.nodes and not is_recipe:
            raise UserError(f"--node needs a recipe, and {self.name} is a component; leave it out", 2)
        spec = None if is_recipe else project.registry.require(self.name)
        if spec is None or implements(spec.cls, Reward):
            source = ProofSource(self.name, **common)
            if spec is not None:
                source = ProofSource("grpo", make_reward_values(spec, folder), **common)
            recipe = source.load({})
            recipe.check(skip_machine_checks=True)
            graph = recipe.graph
            if unknown := [node for node in self.nodes if node not in graph.nodes]:
                raise UserError(f"--node {unknown[0]}: {self.name} has no such node", 2)
            others = [name for name, node in graph.nodes.items() if not node.spec.cls.__module__.startswith(OWN)]
            values = merge_values(shrink_recipe(recipe, folder), make_reproducible_values(graph))
            return source, values, list(self.nodes or others) if spec is None else [REWARD]
        reasons: list[str] = []
        if position := find_node_and_changes(spec):
            node, changes = position
            for heads in (2, 4):  # latent attention has as many key heads as heads
                source = ProofSource(BASE, make_component_recipe(spec, node, changes, folder, heads), **common)
                try:
                    source.load({}).check(skip_machine_checks=True)
                    return source, make_reproducible_values(source.load({}).graph), [node]
                except RecipeError as error:
                    reasons += [f"{problem.text}; {problem.hint}" for problem in error.problems]
        such = _list_shipped_recipes(project, self.name)
        raise UserError(
            f"{self.name} does not fit into the smallest recipe: {[*reasons, 'no port of it has a place there'][0]}. "
            "Prove a recipe with it" + (f", such as {' or '.join(such)}" if such else ""),
            2,
        )

    def _is_recipe(self, project: Project) -> bool:
        return (
            self.name in RecipeFolder(project.recipes).names or self.name.endswith(".toml") or Path(self.name).exists()
        )


def _list_shipped_recipes(project: Project, use: str) -> list[str]:
    """Return the shipped recipes that name a component, and overlays as options."""
    paths = RecipeFolder(project.recipes).paths
    named = [path for path in paths.values() if f'use = "{use}"' in path.read_text("utf-8")]
    return [f"--overlay {path.stem}" if path.parent.name == "overlays" else path.stem for path in named]
