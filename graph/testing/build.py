"""One component, built with the checks that a recipe would make, from values and fakes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from drawloom.graph.build.node import Draft, NodeView
from drawloom.graph.build.settings import SettingsResolver
from drawloom.graph.cli.project import Project
from drawloom.graph.inspect.serialize import escape
from drawloom.graph.port import Every, Ordered
from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.registry.spec import Field, Spec, read_spec
from drawloom.graph.types.port_match import mismatches
from drawloom.graph.types.structure import Values

UNSAVED = ResolvedRecipe("format = 1\n", "")
"""What a component is given whose recipe nobody asked for."""


def build(component: str | type, /, *, package: str = "drawloom", **values: Any) -> Any:
    """
    A component by its class, or by the name that recipes give it; not opened.

    Settings are checked as a recipe's are, objects for edges against their ports. Raises a RecipeError with every
    problem at once. Constraints are asked unless they look at neighbours: an object has no settings to look at.
    """
    spec = _spec(component, package)
    node = _settled(spec, {key: value for key, value in values.items() if not _takes_objects(spec, key)})
    objects = {key: value for key, value in values.items() if _takes_objects(spec, key)}
    problems = [*node.problems, *_edge_problems(spec, objects)]
    if not problems:
        problems = [problem for problem in _constraints(node) if not problem.warning]
    if problems:
        raise RecipeError(problems)
    filled = {key: _filled(spec.fields[key], item) for key, item in objects.items()}
    empty = {field.name: _empty(field) for field in spec.fields.values() if field.kind in ("every", "recipe")}
    return spec.cls(**node.settings, **empty | filled)


def _spec(component: str | type, package: str) -> Spec:
    if isinstance(component, type):
        return read_spec(component.__name__, component)
    found = Project.of(package).registry.find(component)
    if isinstance(found, Problem):
        raise RecipeError([found])
    return found


def _takes_objects(spec: Spec, key: str) -> bool:
    return key in spec.fields and spec.fields[key].kind != "setting"


def _settled(spec: Spec, settings: Mapping[str, Any]) -> Draft:
    """The settings as a recipe would have them, in which text may be a Path or an Enum's value, and None left out."""
    plain = {key: Values.unstructure(value) for key, value in settings.items() if value is not None}
    recipe = Recipe.of({"it": {"use": spec.use, **escape(plain)}}, "build")
    node = Draft(spec.use, recipe.tree.items["it"], spec)  # type: ignore[arg-type]
    SettingsResolver({}).settle(node)
    for key in settings.keys() - plain.keys():
        node.settings[key], faults = Values().structure(None, spec.fields[key].type)
        for fault in faults:
            node.fault("DL303", f"{key}: {fault.text}", fault.hint)
    return node


def _edge_problems(spec: Spec, objects: Mapping[str, Any]) -> Iterator[Problem]:
    for field in spec.fields.values():
        if field.is_edge and field.name not in objects and field.required:
            text = f"{spec.use!r} needs {' or '.join(port.__name__ for port in field.ports)} for {field.name!r}"
            yield Problem("DL315", text, f"give {field.name}=fake({field.ports[0].__name__})", spec.use)
        for item in _members(field, objects.get(field.name)):
            if field.is_edge and all(mismatches(type(item), port) for port in field.ports):
                why = " and ".join(reason for port in field.ports for reason in mismatches(type(item), port)[:2])
                ports = " or ".join(port.__name__ for port in field.ports)
                yield Problem("DL314", f"{field.name} needs {ports}, but {type(item).__name__} {why}", "", spec.use)


def _members(field: Field, given: Any) -> Iterable[Any]:
    if given is None:
        return ()
    if field.kind in ("one", "optional"):
        return (given,)
    return given.values() if isinstance(given, Mapping) else given


def _filled(field: Field, given: Any) -> Any:
    if field.kind == "every" and not isinstance(given, Every):
        return Every(given)
    if field.kind == "ordered" and not isinstance(given, Ordered):
        return Ordered(given)
    return given


def _empty(field: Field) -> Any:
    return Every() if field.kind == "every" else UNSAVED


class _Alone(NodeView):
    """A view without neighbours."""

    def neighbours(self, edge: str) -> list[NodeView]:
        raise _Neighbours(edge)


class _Neighbours(Exception):
    """A constraint looks at neighbours."""


def _constraints(node: Draft) -> Iterator[Problem]:
    constraints = getattr(node.spec.cls, "constraints", None)
    try:
        yield from constraints(_Alone(node.finished(), {})) if constraints else ()
    except _Neighbours:
        return
