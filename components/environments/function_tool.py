"""Tools made from plain functions, marked with `@tool`."""

import types
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, cleandoc, signature
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from drawloom import NodeView, Problem, component
from drawloom.graph import component_base_class

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
"""JSON schema's names of Python's types."""


@component_base_class
class FunctionTool:
    """Base for tools made from functions."""

    function: ClassVar[Callable[..., object]]

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a function without a usable signature."""
        try:
            make_tool_schema(cls.function)
        except ValueError as error:
            yield node.problem("use", f"{error}", "write def add(a: int, b: int = 0) -> int: ..., for example")

    @property
    def tool_schema(self) -> Mapping[str, Any]:
        return make_tool_schema(self.function)


def tool(function: Callable[..., object]) -> type[Any]:
    """
    Make a function a tool's component; a recipe names it like a class: by its file, or as `file.function`.

    A model calls the function by its name, with JSON values; the docstring tells the model what it does. Parameters
    have types: texts, numbers, truth values, lists, or Literal values. The result is shown as a text.
    """
    body: dict[str, Any] = {
        "__module__": function.__module__,
        "__doc__": function.__doc__ or f"Tool by the function {function.__name__}.",
        "function": staticmethod(function),
    }
    return component(type(function.__name__, (FunctionTool,), body))


def make_tool_schema(function: Callable[..., object]) -> dict[str, Any]:
    """Return a function's JSON schema, as chat templates expect it. Raises ValueError for an unusable signature."""
    name = function.__name__
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ValueError(f"the tool {name} has a parameter whose type is unknown: {error}") from error
    parameters = signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ValueError(f"the tool {name} takes *args, **kwargs or a parameter without a name: {parameter}")
        if parameter.name not in hints:
            raise ValueError(f"the tool {name} has a parameter without a type: {parameter.name}")
    properties = {parameter.name: _describe_type(hints[parameter.name], name) for parameter in parameters}
    required = [parameter.name for parameter in parameters if parameter.default is Parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    description = cleandoc(function.__doc__ or "")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _describe_type(kind: Any, name: str) -> dict[str, Any]:
    """Return a parameter type's JSON schema. Raises ValueError for a type without one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    if origin is list and arguments:
        return {"type": "array", "items": _describe_type(arguments[0], name)}
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _describe_type(one, name) for one in arguments]}
    raise ValueError(f"the tool {name} has a parameter of the type {kind}, which JSON values do not have")
