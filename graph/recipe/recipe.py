"""A recipe: its layers merged into nodes, groups and variables, each value knowing where it came from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.problems import Place, Problem
from drawloom.graph.recipe.layers import Layer, Leaf, Table
from drawloom.graph.recipe.loading import RecipeFolder, read_layers
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.recipe.variables import unused
from drawloom.graph.toml.suggest import did_you_mean

FORMAT = 1
"""The number of the recipe format; resolved recipes carry it."""

NAME = re.compile("[A-Za-z][A-Za-z0-9_-]*")
"""What nodes and groups may be called; names stand in references, file names and saved states."""

DIRECTIVES = ("format", "extends", "unset")
"""Top-level keys that say how a file is to be read."""


@attrs.define(eq=False)
class Recipe:
    """Named tables with `use` (nodes), named sets of them (groups), `[vars]`, and what is wrong with all that."""

    source: str
    tree: Table
    nodes: dict[str, Table] = attrs.field(factory=dict)
    groups: dict[str, list[str]] = attrs.field(factory=dict)
    vars: dict[str, Leaf] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    layers: list[Layer] = attrs.field(factory=list)
    _laying: list[Problem] = attrs.field(factory=list)

    @property
    def is_resolved(self) -> bool:
        """Whether it says everything itself: it was written by `show`, or belongs to a run."""
        written = [layer for layer in self.layers if layer.data]
        return len(written) == 1 and "format" in written[0].data and "extends" not in written[0].data

    @classmethod
    def load(
        cls, recipe: str, overlays: Sequence[str] = (), words: Sequence[str] = (), *, recipes: Path = Path("recipes")
    ) -> "Recipe":
        """
        Read a recipe by path or shipped name, lay overlays and command-line words over it.

        Raises a RecipeError if a file can't be read or is not TOML; all other problems are kept in `problems`.
        """
        return merge(recipe, read_layers(recipe, overlays, read_overrides(words), RecipeFolder(recipes)))

    @classmethod
    def of(cls, data: Mapping[str, Any], source: str = "recipe") -> "Recipe":
        """A recipe from plain values."""
        return merge(source, [Layer(source, dict(data))])

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Recipe":
        """Another recipe, with values laid over this one."""
        other = _merge(self.source, self.tree.copy(), [Layer(source, dict(data))])
        return attrs.evolve(other, layers=self.layers + other.layers, problems=self._laying + other.problems)


def merge(source: str, layers: Sequence[Layer]) -> Recipe:
    """Lay the layers over one another, lowest first."""
    return _merge(source, Table(layers[0], ()), layers)


def _merge(source: str, tree: Table, layers: Sequence[Layer]) -> Recipe:
    problems: list[Problem] = []
    for layer in layers:
        problems += _remove_unset(tree, layer)
        problems += _check_format(layer)
        tree.merge({key: value for key, value in layer.data.items() if key not in DIRECTIVES}, layer, ())
    recipe = _sort(source, tree)
    problems += unused(recipe.vars, list(layers))
    return attrs.evolve(recipe, layers=list(layers), laying=problems, problems=recipe.problems + problems)


def _check_format(layer: Layer) -> Iterator[Problem]:
    number = layer.data.get("format", FORMAT)
    if number != FORMAT or isinstance(number, bool):
        text = f"recipes of format {number!r} can't be read, only those of format {FORMAT}"
        yield Problem("DL107", text, place=layer.value(("format",)))


def _remove_unset(top: Table, layer: Layer) -> Iterator[Problem]:
    names = layer.data.get("unset", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        hint = 'write unset = ["listeners.profiler"]'
        yield Problem("DL108", "unset takes an array of strings", hint, place=layer.value(("unset",)))
        return
    for number, name in enumerate(names):
        if not top.remove(tuple(name.split("."))):
            hint = did_you_mean(name, _names(top))
            yield Problem("DL109", f"there is no {name!r} to unset", hint, place=layer.value(("unset", number)))


def _names(top: Table) -> Iterator[str]:
    for name, table in top.items.items():
        yield name
        if isinstance(table, Table):
            yield from (f"{name}.{key}" for key in table.items)


def _sort(source: str, top: Table) -> Recipe:
    """What each top-level table is: a node, a group, or a fault."""
    recipe = Recipe(source, top)
    for name, item in top.items.items():
        if name == "vars":
            _take_vars(recipe, item)
        elif not NAME.fullmatch(name):
            recipe.problems.append(_misnamed(name, item))
        elif not isinstance(item, Table):
            text = f"{name!r} stands outside of any table"
            hint = did_you_mean(name, (*DIRECTIVES, "vars")) or "settings belong in a [node]"
            recipe.problems.append(Problem("DL111", text, hint, place=item.key_place))
        elif "use" in item.items:
            recipe.nodes[name] = item
        elif all(isinstance(member, Table) and "use" in member.items for member in item.items.values()):
            recipe.groups[name] = []
            _take_group(recipe, name, item)
        else:
            recipe.problems += _nobody(name, item, top)
            _take_group(recipe, name, item)
    return recipe


def _misnamed(name: str, item: Leaf | Table) -> Problem:
    place = item.key_place if isinstance(item, Leaf) else item.place
    return Problem(
        "DL115", f"{name!a} can't be the name of a node", "use letters, digits, _ and -, a letter first", place=place
    )


def _take_group(recipe: Recipe, name: str, item: Table) -> None:
    named = {key: part for key, part in item.items.items() if isinstance(part, Table) and "use" in part.items}
    recipe.problems += [_misnamed(f"{name}.{key}", part) for key, part in named.items() if not NAME.fullmatch(key)]
    members = {f"{name}.{key}": part for key, part in named.items() if NAME.fullmatch(key)}
    recipe.nodes |= members
    if members:
        recipe.groups[name] = list(members)


def _take_vars(recipe: Recipe, item: Leaf | Table) -> None:
    if not isinstance(item, Table):
        recipe.problems.append(Problem("DL112", "vars must be a table", "write [vars]", place=item.key_place))
        return
    for key, leaf in item.items.items():
        if isinstance(leaf, Table):
            text = f"vars.{key} is a table; a variable is a single value or an array"
            recipe.problems.append(Problem("DL112", text, place=leaf.place))
        else:
            recipe.vars[key] = leaf


def _nobody(name: str, item: Table, top: Table) -> Iterator[Problem]:
    """A table that is neither node nor group: keys of it, or of its members, belong to a node that is not there."""
    is_group = any(isinstance(member, Table) and "use" in member.items for member in item.items.values())
    if not is_group:
        near = did_you_mean(name, [key for key, table in top.items.items() if key != name and isinstance(table, Table)])
        hint = near if near.startswith("did") else 'a node needs a line like use = "data.loader"'
        text = "nothing of this name is below, and it has no `use`, so its keys belong to no node"
        yield Problem("DL113", text, hint, name, _first_place(item))
        return
    for key, member in item.items.items():
        if not (isinstance(member, Table) and "use" in member.items):
            text = f"{key!r} is no node, but its siblings are: a group holds nodes only"
            place = member.key_place if isinstance(member, Leaf) else member.place
            yield Problem("DL114", text, f'write [{name}.{key}] with a line use = "..."', name, place)


def _first_place(item: Table) -> Place:
    """The place of the table, or of its first value if the command line set it."""
    leaf = next((leaf for leaf in item.items.values() if isinstance(leaf, Leaf)), None)
    return item.place if item.layer.text is not None or leaf is None else leaf.place
