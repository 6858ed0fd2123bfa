"""Build one component with the checks of a recipe, for tests."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from drawloom.graph.component import Every, Ordered
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.spec import Field, Spec, read_spec
from drawloom.graph.types.port_match import find_mismatches, implements_any, join_mismatches
from drawloom.graph.types.structure import ValueConverter
from drawloom.graph.wiring.node import Node, NodeView
from drawloom.graph.wiring.settings import SettingsResolver

EMPTY_RECIPE = ResolvedRecipe("format = 1\n", "")
"""The resolved recipe of components that are built without a recipe."""


def build(component: str | type, /, *, package: str = "drawloom", **values: Any) -> Any:
    """
    Construct a component, by class or by its name in recipes, without opening it.

    Settings are checked like those in a recipe, and objects for edges against their ports. Raises RecipeError with all
    problems. Constraints are skipped if they read neighbours, because an object for an edge has no settings.
    """
    spec = _find_spec(component, package)
    node = _make_node(spec, {key: value for key, value in values.items() if not _is_edge_or_container_field(spec, key)})
    objects = {key: value for key, value in values.items() if _is_edge_or_container_field(spec, key)}
    problems = [*node.problems, *_check_edges(spec, objects)]
    if not problems:
        problems = [problem for problem in _check_constraints(node) if not problem.warning]
    if problems:
        raise RecipeError(problems)
    objects_by_field = {key: _wrap_edge_objects(spec.fields[key], item) for key, item in objects.items()}
    defaults = {
        field.name: _make_value_for_container_field(field)
        for field in spec.fields.values()
        if field.kind in ("every", "recipe")
    }
    return spec.cls(**node.settings, **defaults | objects_by_field)


def _find_spec(component: str | type, package: str) -> Spec:
    if isinstance(component, type):
        return read_spec(component.__name__, component)
    return Project.from_package(package).registry.require(component)


def _is_edge_or_container_field(spec: Spec, key: str) -> bool:
    return key in spec.fields and spec.fields[key].kind != "setting"


def _make_node(spec: Spec, settings: Mapping[str, Any]) -> Node:
    """Return a node with settings converted as in a recipe. A Path or Enum may be passed as such, or as text."""
    plain = {key: convert_to_toml_types(value) for key, value in settings.items() if value is not None}
    recipe = MergedRecipe.from_values({"it": {"use": spec.use, **plain}}, "build")
    node = Node(spec.use, recipe.tree.items["it"], spec)  # type: ignore[arg-type]
    SettingsResolver({}).resolve(node)
    for key in settings.keys() - plain.keys():
        value, problems = ValueConverter().structure(None, spec.fields[key].type)
        node.set_setting(key, value)
        for problem in problems:
            node.add_problem(problem.code, f"{key}: {problem.text}", problem.hint)
    return node


def _check_edges(spec: Spec, objects: Mapping[str, Any]) -> Iterator[Problem]:
    for field in spec.fields.values():
        if field.is_edge and field.name not in objects and field.required:
            text = f"{spec.use!r} needs {' or '.join(port.__name__ for port in field.ports)} for {field.name!r}"
            yield Problem("DL315", text, f"pass {field.name}=fake({field.ports[0].__name__})", spec.use)
        for item in _list_edge_objects(field, objects.get(field.name)):
            cls: type = type(item)
            if field.is_edge and not implements_any(cls, field.ports):
                reasons = join_mismatches([reason for port in field.ports for reason in find_mismatches(cls, port)[:2]])
                ports = " or ".join(port.__name__ for port in field.ports)
                yield Problem("DL314", f"{field.name} needs {ports}, but {cls.__name__} {reasons}", "", spec.use)


def _list_edge_objects(field: Field, value: Any) -> Iterable[Any]:
    """Return the objects passed for an edge."""
    if value is None:
        return ()
    if field.kind in ("one", "optional"):
        return (value,)
    return value.values() if isinstance(value, Mapping) else value


def _wrap_edge_objects(field: Field, value: Any) -> Any:
    """Return the objects for a field in the class used by the container."""
    if field.kind == "every" and not isinstance(value, Every):
        return Every(value)
    if field.kind == "ordered" and not isinstance(value, Ordered):
        return Ordered(value)
    return value


def _make_value_for_container_field(field: Field) -> Any:
    """Return a value for a field filled by the container."""
    return Every() if field.kind == "every" else EMPTY_RECIPE


class _NeighbourRefusingView(NodeView):
    """View of a node without neighbours."""

    def neighbours(self, edge: str) -> list[NodeView]:
        raise _NeighbourAccessError(edge)

    def reachable(self) -> Iterator[NodeView]:
        raise _NeighbourAccessError("reachable")

    def edge_keys(self, edge: str) -> list[str]:
        raise _NeighbourAccessError(edge)


class _NeighbourAccessError(Exception):
    """Raised when a constraint reads neighbours."""


def _check_constraints(node: Node) -> Iterator[Problem]:
    constraints = getattr(node.spec.cls, "constraints", None)
    try:
        yield from constraints(_NeighbourRefusingView(node, {})) if constraints else ()
    except _NeighbourAccessError:  # an object for an edge has no settings that a constraint could check
        return
