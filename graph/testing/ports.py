"""
Fakes of ports, which record their calls, contract checks for implementations of a port, and misspelt capabilities.

A capability is misspelt if an attribute has nearly the name of an optional member.

Tests build a single component with the checks of a recipe.
"""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from difflib import get_close_matches
from types import ModuleType
from typing import Any, Literal

import attrs

from drawloom.graph import lifecycle
from drawloom.graph.component import Every, Ordered, is_port_or_component
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.registry import Field, Spec, read_spec
from drawloom.graph.types.port_match import find_mismatches, implements_any, join_mismatches, list_protocol_members
from drawloom.graph.types.structure import CONVERTER
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
    if isinstance(component, type):
        spec = read_spec(component.__name__, component)
    else:
        spec = Project.from_package(package).registry.require(component)
    node = _make_node(spec, {key: value for key, value in values.items() if not _is_edge_or_container_field(spec, key)})
    objects = {key: value for key, value in values.items() if _is_edge_or_container_field(spec, key)}
    problems = [*node.problems, *_check_edges(spec, objects)]
    if not problems:
        problems = [problem for problem in _check_constraints(node) if not problem.warning]
    if problems:
        raise RecipeError(problems)
    objects_by_field = {key: _wrap_edge_objects(spec.fields[key], item) for key, item in objects.items()}
    defaults: dict[str, Any] = {
        field.name: Every() if field.kind == "every" else EMPTY_RECIPE
        for field in spec.fields.values()
        if field.kind in ("every", "recipe")
    }
    return spec.cls(**node.settings, **defaults | objects_by_field)


def _is_edge_or_container_field(spec: Spec, key: str) -> bool:
    return key in spec.fields and spec.fields[key].kind != "setting"


def _make_node(spec: Spec, settings: Mapping[str, Any]) -> Node:
    """Return a node with settings converted as in a recipe. A Path or Enum may be passed as such, or as text."""
    plain = {key: convert_to_toml_types(value) for key, value in settings.items() if value is not None}
    recipe = MergedRecipe.from_values({"it": {"use": spec.use, **plain}}, "build")
    node = Node(spec.use, recipe.tree.items["it"], spec)  # type: ignore[arg-type]
    SettingsResolver({}).resolve(node)
    for key in settings.keys() - plain.keys():
        value, problems = CONVERTER.structure(None, spec.fields[key].type)
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


EMPTY: dict[Any, Callable[[], Any]] = {int: int, float: float, str: str, bool: bool, bytes: bytes, list: list}
EMPTY |= {dict: dict, tuple: tuple, Mapping: dict, set: set, AbstractContextManager: nullcontext}
"""Default return values of a fake's methods, by annotated type: empty or zero."""


@attrs.frozen
class Call:
    """A recorded call of a fake's method, with its arguments by name."""

    method: str
    arguments: dict[str, Any]


def fake(*ports: type, **answers: Any) -> Any:
    """
    Return an object implementing all these ports.

    `answers` are attribute values and return values for methods: a value, or a function with the arguments of the
    method. Every other value is empty for its annotated type: 0, "", an empty list, another fake for another port,
    None. Reading another value, such as a tensor, raises a TypeError with the names of port and member.
    `calls` lists the calls of methods as `Call`s. Raises TypeError for calls not allowed by the port, and immediately
    for names missing in all ports.
    """
    known = {name: port for port in ports for name in list_protocol_members(port)}
    unknown = answers.keys() - known.keys()
    if unknown:
        names = " and ".join(port.__name__ for port in ports)
        raise TypeError(f"{names} has no member {', '.join(sorted(unknown))}; available: {', '.join(sorted(known))}")
    calls: list[Call] = []
    namespace: dict[str, Any] = {"calls": calls, "__annotations__": {}}
    for name, port in known.items():
        expected = inspect.getattr_static(port, name, None)
        if inspect.isfunction(expected):
            namespace[name] = _make_method(port, expected, calls, answers.get(name, _Unanswered))
        else:
            namespace["__annotations__"][name] = kind = _read_attribute_type(port, name, expected)
            namespace[name] = answers[name] if name in answers else _make_empty_attribute(port, name, kind)
    # A new class, because ports are matched by class.
    return type(f"Fake{''.join(port.__name__ for port in ports)}", (), namespace)()


class _Unanswered:
    """Marker for a method without an answer; None may be an answer."""


def _make_method(port: type, expected: Callable[..., Any], calls: list[Call], answer: Any) -> Callable[..., Any]:
    signature = inspect.signature(expected)
    kind = typing.get_type_hints(expected).get("return")

    @functools.wraps(expected)
    def record_call_and_answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        calls.append(Call(expected.__name__, dict(list(bound.arguments.items())[1:])))
        if answer is _Unanswered:
            return _require_empty_value(port, expected.__name__, kind)
        return answer(*args, **kwargs) if callable(answer) else answer

    return record_call_and_answer


def _read_attribute_type(port: type, name: str, expected: Any) -> Any:
    """Return the annotated type of a port's attribute or property `expected`; Any if it has no annotation."""
    hints = typing.get_type_hints(expected.fget if isinstance(expected, property) else port)
    return hints.get("return" if isinstance(expected, property) else name, Any)


def _make_empty_attribute(port: type, name: str, kind: Any) -> Any:
    """Return an empty value for an attribute's type, or a property raising TypeError."""
    value = _make_empty_value(kind)
    if value is not _Unanswered:
        return value
    return property(lambda self: _require_empty_value(port, name, kind))


def _require_empty_value(port: type, name: str, kind: Any) -> Any:
    """Return an empty value for the type of a port's member. Raises TypeError if the type has none."""
    if (value := _make_empty_value(kind)) is _Unanswered:
        raise TypeError(f"the fake of {port.__name__} has no {name}; write fake({port.__name__}, {name}=...)")
    return value


def _make_empty_value(kind: Any) -> Any:
    """Return an empty value for a type; _Unanswered for a type without one."""
    origin = typing.get_origin(kind) or kind
    if origin in EMPTY:
        return EMPTY[origin]()
    if origin is Literal:
        return typing.get_args(kind)[0]
    if origin in (typing.Union, types.UnionType) and type(None) not in typing.get_args(kind):
        return _make_empty_value(typing.get_args(kind)[0])
    if getattr(origin, "_is_protocol", False) and is_port_or_component(origin):
        return fake(origin)
    if getattr(origin, "__name__", "") in ("Iterator", "Iterable", "Generator", "Sequence", "Collection"):
        return iter(()) if origin.__name__ in ("Iterator", "Generator") else []
    is_optional = kind is None or origin is type(None) or type(None) in typing.get_args(kind)
    return None if is_optional or kind is Any else _Unanswered


Property = Callable[..., None]


class BrokenContractError(AssertionError):
    """An implementation violates the contract of its port."""


def expect(condition: object, failure: str) -> None:
    """Raise BrokenContractError with the message `failure` unless the condition is true."""
    if not condition:
        raise BrokenContractError(failure)


def load_contract(port: type) -> list[Property]:
    """Return the properties in a port's contract. Raises LookupError if the port has none."""
    name = contract_module_name(port)
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    properties = _find_properties(importlib.import_module(name), port) if spec else []
    if not properties:
        raise LookupError(f"{port.__name__} has no contract: {name} has no function with a parameter of this type")
    return properties


def contract_module_name(port: type) -> str:
    """Return the contracts module for a ports module: `a.contracts.data` for `a.ports.data`."""
    return re.sub(r"\.ports(?=\.|$)", ".contracts", port.__module__)


def _find_properties(module: ModuleType, port: type) -> list[Property]:
    """Return a module's public functions whose first parameter is annotated with the port."""
    functions = [item for name, item in vars(module).items() if inspect.isfunction(item) and name[0] != "_"]
    own = [function for function in functions if function.__module__ == module.__name__]
    return [function for function in own if next(iter(typing.get_type_hints(function).values()), None) is port]


def check_port(implementation: str | type | Callable[[], Any], port: type, /, **values: Any) -> None:
    """
    Check an implementation against a port's contract.

    The implementation is a component (its class or name), which is built with `values` and opened, or a function that
    returns an instance or a context manager for one. Every property receives new instances, which are closed
    afterwards. Raises BrokenContractError for the first violated property, with a note naming the property, and for an
    attribute that resembles an optional member of a port but is named differently.
    """
    for check in load_contract(port):
        with ExitStack() as stack:
            instances = [_make_instance(implementation, values, stack) for _ in inspect.signature(check).parameters]
            for instance in instances:
                reasons = find_mismatches(type(instance), port)
                expect(
                    not reasons, f"{type(instance).__name__} is not a {port.__name__}: it {join_mismatches(reasons)}"
                )
                expect(not (sentences := describe_misspelt_members(type(instance), port)), "; ".join(sentences))
            try:
                check(*instances)
            except Exception as error:
                error.add_note(f"{port.__name__}: {inspect.getdoc(check)}")
                raise


def _make_instance(implementation: Any, values: dict[str, Any], stack: ExitStack) -> Any:
    is_component = isinstance(implementation, str) or "__component__" in vars(implementation)
    instance = build(implementation, **values) if is_component else implementation(**values)
    if hasattr(instance, "__enter__"):
        return stack.enter_context(instance)
    if hasattr(instance, "close"):
        stack.callback(instance.close)
    if hasattr(instance, "open"):
        instance.open()
    return instance


SIMILARITY = 0.8
"""Of two names, by difflib: `observe` and `observes` have 0.93, `end_on_every_rank` and `embeds_on_every_rank` 0.86."""


def describe_misspelt_members(cls: type, port: type) -> list[str]:
    """Return a sentence for each public attribute of a class whose name resembles that of an optional member."""
    declared, optional = _list_port_members(re.sub(r"(\.ports)\..*", r"\1", port.__module__))
    similar = (
        (name, get_close_matches(name, optional, n=1, cutoff=SIMILARITY))
        for name in _list_public_names_except_settings(cls) - declared
    )
    return [
        f"{cls.__name__} has {name}, which no port declares; did you mean {other}?"
        for name, others in sorted(similar)
        for other in others
    ]


def _list_public_names_except_settings(cls: type) -> set[str]:
    """Return the public attributes of a class without its settings and without attributes from other packages."""
    fields = {field.name: field.init for field in attrs.fields(cls)} if attrs.has(cls) else {}
    package = cls.__module__.partition(".")[0]
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == package]
    names = {*(name for base in bases for name in vars(base)), *fields}
    return {name for name in names if not name.startswith("_") and not fields.get(name)}


@functools.cache
def _list_port_members(package: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets, from a package's ports and `graph.lifecycle`: all members, and the optional members."""
    protocols = [cls for module in (*_import_modules(package), lifecycle) for cls in _iterate_protocols(module)]
    optional = [*find_capability_protocols(package), *find_capability_protocols(lifecycle.__name__)]
    names = {name for cls in optional for name in (*inspect.get_annotations(cls), *vars(cls))}
    declared = frozenset(name for cls in protocols for name in list_protocol_members(cls))
    return declared, declared & names


def find_capability_protocols(package: str) -> list[type]:
    """Return the Protocols of optional members in a module or package."""
    return [cls for module in _import_modules(package) for cls in _iterate_protocols(module) if _is_capability(cls)]


def _is_capability(protocol: Any) -> bool:
    """Return whether a Protocol is tested with isinstance, and either extends a port or is not a port itself."""
    extends = any(is_port_or_component(base) for base in protocol.__mro__[1:])
    return bool(protocol._is_runtime_protocol) and (extends or not is_port_or_component(protocol))


def _import_modules(package: str) -> Iterator[ModuleType]:
    module = importlib.import_module(package)
    yield module
    for item in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{package}."):
        yield importlib.import_module(item.name)


def _iterate_protocols(module: ModuleType) -> Iterator[type]:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ == module.__name__ and getattr(cls, "_is_protocol", False):
            yield cls
