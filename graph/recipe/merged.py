"""A merged recipe: layers combined into nodes, groups and variables. Every value knows its origin."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from drawloom.graph.garbage import pause_garbage_collection
from drawloom.graph.problems import Problem, did_you_mean
from drawloom.graph.recipe.layers import EDIT, STARTED_IN, Layer, Leaf, Table

FORMAT = 1
"""Version of the recipe format, written in resolved recipes."""

NAME = re.compile("[A-Za-z][A-Za-z0-9_-]*")
"""Valid names of nodes and groups, which appear in references, file names and saved state."""

VARIABLE = "$vars."
"""Prefix of a reference to a variable. The reference is always a whole value."""

DIRECTIVES = ("format", STARTED_IN, "extends", "unset", EDIT)
"""Top-level keys that control how a file is read. They are not part of the merged recipe."""


@attrs.define(eq=False)
class MergedRecipe:
    """Named tables with `use` (nodes), named sets of nodes (groups), `[vars]`, and the problems found while merging."""

    source: str
    tree: Table
    nodes: dict[str, Table] = attrs.field(factory=dict)
    groups: dict[str, list[str]] = attrs.field(factory=dict)
    vars: dict[str, Leaf] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    layers: list[Layer] = attrs.field(factory=list)
    _merging: list[Problem] = attrs.field(factory=list)

    @property
    def is_resolved(self) -> bool:
        """Whether it is complete by itself: output of `drawloom show`, or the lock file of a run."""
        written = [layer for layer in self.layers if layer.data]
        return len(written) == 1 and "format" in written[0].data and "extends" not in written[0].data

    @property
    def folder(self) -> str:
        """The folder for relative paths of a run's lock file; empty if it is the current directory."""
        return next((layer.folder for layer in self.layers if layer.folder), "")

    @property
    def own_layers(self) -> list[Layer]:
        """The layers written by the user: neither bases nor, if other layers exist, shipped recipes."""
        named = [layer for layer in self.layers if layer.data and not layer.is_base]
        return [layer for layer in named if not layer.is_shipped] or named

    @classmethod
    def from_values(cls, data: Mapping[str, Any], source: str = "recipe") -> "MergedRecipe":
        """Make a recipe from plain values."""
        return merge_layers(source, [Layer(source, dict(data))])

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "MergedRecipe":
        """Return a recipe with other values merged over this one."""
        layer = Layer(source, dict(data))
        refused = [*self._merging, *_report_extends_in_merged_values(layer)]
        return _merge_over_tree(self.source, self.tree.copy(), [layer], self.layers, refused)


def merge_layers(source: str, layers: Sequence[Layer]) -> MergedRecipe:
    """Merge layers into a recipe, each layer over the earlier ones."""
    return _merge_over_tree(source, Table(layers[0], ()), layers)


@pause_garbage_collection()
def _merge_over_tree(
    source: str,
    tree: Table,
    layers: Sequence[Layer],
    layers_of_tree: Sequence[Layer] = (),
    earlier_problems: Sequence[Problem] = (),
) -> MergedRecipe:
    """Merge layers over a tree, which is merged from `layers_of_tree` with `earlier_problems`."""
    problems = [*earlier_problems]
    for layer in layers:
        # Before merging, so that a layer may unset a node and write it anew.
        problems += _apply_unset_directive(tree, layer)
        problems += _check_format_and_folder(layer)
        plain = [key for key, value in layer.data.items() if key != "vars" and not isinstance(value, dict)]
        misplaced = {key: problem for key in plain if (problem := _check_key_is_no_table(tree, key))}
        problems += [attrs.evolve(problem, position=layer.key_position((key,))) for key, problem in misplaced.items()]
        values = {key: value for key, value in layer.data.items() if key not in (*DIRECTIVES, *misplaced)}
        tree.merge_layer(values, layer, ())
        if EDIT in layer.data:  # last, since a layer may also write the list that it edits
            from drawloom.graph.recipe.edits import apply_edits  # few recipes edit lists

            problems += apply_edits(tree, layer)
    recipe = _classify_tables(source, tree)
    all_layers = [*layers_of_tree, *layers]
    unused = _check_unused_variables(recipe.vars, all_layers)
    variables, faults = _resolve_variables(recipe.vars)
    problems_of_all = [*recipe.problems, *problems, *faults, *unused]
    return attrs.evolve(recipe, vars=variables, layers=all_layers, merging=problems, problems=problems_of_all)


def _check_key_is_no_table(tree: Table, key: str) -> Problem | None:
    """Return a problem if a value would replace a node or group, which other nodes may need."""
    if not isinstance(old_item := tree.items.get(key), Table):
        return None
    keys = [name for name, item in old_item.items.items() if isinstance(item, Leaf) and name != "use"]
    hint = f"write its values below [{key}]" + (f", such as {key}.{keys[0]}" if keys else "")
    return Problem("DL111", f"{key!r} is a table, not a value", hint)


def _check_format_and_folder(layer: Layer) -> Iterator[Problem]:
    number = layer.data.get("format", FORMAT)
    if not isinstance(layer.data.get(STARTED_IN, ""), str):
        text = f"{STARTED_IN} must be a string, the folder where the run was started"
        yield Problem("DL107", text, position=layer.value_position((STARTED_IN,)))
    if number != FORMAT or isinstance(number, bool):  # True == 1
        text = f"recipe format {number!r} is not supported, only format {FORMAT}"
        yield Problem("DL107", text, position=layer.value_position(("format",)))


def _report_extends_in_merged_values(layer: Layer) -> Iterator[Problem]:
    if "extends" in layer.data:
        text = "values that are merged over a recipe can't extend another one"
        yield Problem("DL120", text, "extend it in the recipe itself", position=layer.value_position(("extends",)))


def _apply_unset_directive(top: Table, layer: Layer) -> Iterator[Problem]:
    """Remove the layer's `unset` names from the tree while yielding problems; consume it before merging the layer."""
    names = layer.data.get("unset", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        hint = 'write unset = ["listeners.profiler"]'
        yield Problem("DL108", "unset must be an array of strings", hint, position=layer.value_position(("unset",)))
        return
    for number, name in enumerate(names):
        if not top.remove(tuple(name.split("."))):
            hint = did_you_mean(name, _iterate_node_names(top))
            yield Problem(
                "DL109", f"there is no {name!r} to unset", hint, position=layer.value_position(("unset", number))
            )


def _iterate_node_names(top: Table) -> Iterator[str]:
    for name, table in top.items.items():
        yield name
        if isinstance(table, Table):
            yield from (f"{name}.{key}" for key in table.items)


def _classify_tables(source: str, top: Table) -> MergedRecipe:
    """Sort the top-level tables into nodes, groups, variables and problems."""
    recipe = MergedRecipe(source, top)
    for name, item in top.items.items():
        if name == "vars":
            _add_variables(recipe, item)
        elif not NAME.fullmatch(name):
            recipe.problems.append(_make_name_problem(name, item))
        elif not isinstance(item, Table):
            text = f"{name!r} is outside of any table"
            near = did_you_mean(name, DIRECTIVES)
            hint = near if near.startswith(("did", "write")) else "write it below the [node] that it belongs to"
            recipe.problems.append(Problem("DL111", text, hint, position=item.key_position))
        elif "use" in item.items:
            recipe.nodes[name] = item
        elif all(isinstance(member, Table) and "use" in member.items for member in item.items.values()):
            recipe.groups[name] = []
            _add_group(recipe, name, item)
        else:
            recipe.problems += _check_incomplete_table(name, item, top)
            _add_group(recipe, name, item)
    return recipe


def _make_name_problem(name: str, item: Leaf | Table) -> Problem:
    position = item.key_position if isinstance(item, Leaf) else item.position
    return Problem(
        "DL115",
        f"{name!a} can't be the name of a node",
        "use letters, digits, _ and -, a letter first",
        position=position,
    )


def _add_group(recipe: MergedRecipe, name: str, item: Table) -> None:
    named = {key: part for key, part in item.items.items() if isinstance(part, Table) and "use" in part.items}
    recipe.problems += [
        _make_name_problem(f"{name}.{key}", part) for key, part in named.items() if not NAME.fullmatch(key)
    ]
    members = {f"{name}.{key}": part for key, part in named.items() if NAME.fullmatch(key)}
    recipe.nodes |= members
    if members:
        recipe.groups[name] = list(members)


def _add_variables(recipe: MergedRecipe, item: Leaf | Table) -> None:
    if not isinstance(item, Table):
        recipe.problems.append(Problem("DL112", "vars must be a table", "write [vars]", position=item.key_position))
        return
    for key, leaf in item.items.items():
        if isinstance(leaf, Table):
            text = f"vars.{key} is a table; a variable is a single value or an array"
            recipe.problems.append(Problem("DL112", text, position=leaf.position))
        else:
            recipe.vars[key] = leaf


def _resolve_variables(variables: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], list[Problem]]:
    """Return the variables with the values of the variables they refer to, and problems with their references."""
    resolved: dict[str, Leaf] = {}
    problems: list[Problem] = []
    for name, leaf in variables.items():
        try:
            value = _substitute_variables(leaf.value, variables, (name,))
        except _ReferenceError as error:
            problems.append(Problem("DL307", f"vars.{name}: {error}", error.hint, position=leaf.position))
            value = leaf.value
        resolved[name] = leaf if value == leaf.value else attrs.evolve(leaf, value=value)
    return resolved, problems


class _ReferenceError(Exception):
    """Error for an unresolvable reference from one variable to another, with a hint."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


def _substitute_variables(value: Any, variables: Mapping[str, Leaf], names: tuple[str, ...]) -> Any:
    """Return a value with variables' values in place of references; `names` are the variables around it."""
    if isinstance(value, list):
        return [_substitute_variables(part, variables, names) for part in value]
    if isinstance(value, dict):
        return {key: _substitute_variables(part, variables, names) for key, part in value.items()}
    if not (isinstance(value, str) and value.startswith(VARIABLE)):
        return value
    name = value.removeprefix(VARIABLE)
    if name in names:
        circle = " = ".join(f"{VARIABLE}{part}" for part in (*names[names.index(name) :], name))
        raise _ReferenceError(f"it refers to itself, {circle}", "write the value itself in one of them")
    if name not in variables:
        raise _ReferenceError(f"there is no variable {value!r}", describe_missing_variable(name, variables))
    return _substitute_variables(variables[name].value, variables, (*names, name))


def describe_missing_variable(name: str, variables: Iterable[str]) -> str:
    """Return a hint for a reference to a missing variable."""
    from drawloom.graph.spelling import find_nearest

    near = find_nearest(name, variables)
    return f"did you mean {near!r}?" if near else f"write {name} = ... in [vars], or add vars.{name}=... to the command"


def _check_incomplete_table(name: str, item: Table, top: Table) -> Iterator[Problem]:
    """Yield problems with a table that is neither a node nor a group: its keys belong to a missing node."""
    is_group = any(isinstance(member, Table) and "use" in member.items for member in item.items.values())
    if not is_group:
        near = did_you_mean(name, [key for key, table in top.items.items() if key != name and isinstance(table, Table)])
        hint = near if near.startswith("did") else 'a node needs a line like use = "data.loader"'
        text = "it has no `use`, and no extended recipe has a node of this name"
        # The command line makes tables without a position of their own.
        leaf = next((leaf for leaf in item.items.values() if isinstance(leaf, Leaf)), None)
        position = item.position if item.layer.text is not None or leaf is None else leaf.position
        yield Problem("DL113", text, hint, name, position)
        return
    for key, member in item.items.items():
        if not (isinstance(member, Table) and "use" in member.items):
            text = f"{key!r} is not a node, but the other members of this group are"
            position = member.key_position if isinstance(member, Leaf) else member.position
            yield Problem("DL114", text, f'write [{name}.{key}] with a line use = "..."', name, position)


def _check_unused_variables(variables: dict[str, Leaf], layers: Sequence[Layer]) -> Iterator[Problem]:
    """
    Yield a warning for every variable without a reference, even an overridden one.

    If another name is very similar, the warning is an error: this name must be a typing error.
    """
    used = set(_find_variable_names([layer.data for layer in layers])) if variables else set()
    known = used | variables.keys()
    for name, leaf in variables.items():
        if name not in used:
            from drawloom.graph.spelling import MAX_CANDIDATES, find_nearest

            text = f"nothing refers to the variable {VARIABLE + name!r}"
            # removing a name from a set costs time proportional to its size
            near = find_nearest(name, known - {name}) if len(known) < MAX_CANDIDATES else None
            hint = f"did you mean {near!r}?" if near else ""
            yield Problem("DL116", text, hint, position=leaf.key_position, warning=near is None)


def _find_variable_names(data: Any) -> Iterator[str]:
    """Yield all variable names used in a value tree."""
    stack = [data]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, list):
            stack += part
        elif isinstance(part, str) and part.startswith(VARIABLE):
            yield part.removeprefix(VARIABLE)
