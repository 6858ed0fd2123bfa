"""Find definitions in an extended recipe, or in the source of a component."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.problems import Position
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.registry.registry import Field, Spec


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
