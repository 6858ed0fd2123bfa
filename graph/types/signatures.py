"""Whether one function can be called in every way in which another can: by trying the calls on paper."""

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Any

Call = tuple[list[str], dict[str, str]]
"""What is given by place and what by name; each value is the name of what it is meant for."""

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
MANY = ("",) * 20
"""What is given where any number may be."""

STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def call_mismatch(given: Callable[..., Any], promised: Callable[..., Any]) -> str:
    """How `given` can't be called as `promised` says, both without their first parameter; nothing if it can."""
    ours, theirs = (_signature(function) for function in (given, promised))
    if not all(_takes(ours, call, theirs) for call in _calls(theirs)):
        name = promised.__name__
        return f"has a {name}({_shown(ours)}) that can't be called as {name}({_shown(theirs)})"
    if inspect.iscoroutinefunction(given) != inspect.iscoroutinefunction(promised):
        return f"has {promised.__name__}() {'as' if inspect.iscoroutinefunction(given) else 'not as'} a coroutine"
    return ""


def _signature(function: Callable[..., Any]) -> Signature:
    return Signature([*inspect.signature(function).parameters.values()][1:])


def _calls(signature: Signature) -> Iterator[Call]:
    """The ways to call: so many by place, the others by name, with and without what may be left out."""
    parameters = signature.parameters.values()
    places = [parameter for parameter in parameters if parameter.kind in BY_PLACE]
    for number in range(len(places) + 1):
        if any(p.kind is Parameter.POSITIONAL_ONLY and _is_needed(p) for p in places[number:]):
            continue
        names = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        names += [p for p in places[number:] if p.kind is not Parameter.POSITIONAL_ONLY]
        needed, all_names = ({p.name: p.name for p in names if whole or _is_needed(p)} for whole in (False, True))
        by_place = [p.name for p in places[:number]]
        yield by_place, needed
        yield by_place, all_names
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        yield [*by_place, *MANY], needed
        yield [*by_place, *MANY], all_names
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        yield by_place, needed | {"a name that nobody else has": ""}


def _is_needed(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty


def _takes(ours: Signature, call: Call, theirs: Signature) -> bool:
    """Whether a call is taken, and what is given by name reaches no other parameter by place."""
    try:
        bound = ours.bind(*call[0], **call[1]).arguments
    except TypeError:
        return False
    renamed = {p.name for p in theirs.parameters.values() if p.kind is Parameter.POSITIONAL_ONLY}
    starred = {p.name for p in ours.parameters.values() if p.kind in STARRED}
    return all(value in (name, "") or value in renamed for name, value in bound.items() if name not in starred)


def _shown(signature: Signature) -> str:
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()]
    return str(Signature(bare))[1:-1]
