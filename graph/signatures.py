"""Whether one function can be called in every way in which another can."""

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def uncallable(given: Callable[..., Any], promised: Callable[..., Any]) -> str:
    """How `given` can't be called as `promised` says, both without their first parameter; nothing if it can."""
    ours, theirs = ([*inspect.signature(function).parameters.values()][1:] for function in (given, promised))
    if any(_breaks(ours, theirs)):
        name = promised.__name__
        return f"has a {name}({_shown(ours)}) that can't be called as {name}({_shown(theirs)})"
    if inspect.iscoroutinefunction(given) != inspect.iscoroutinefunction(promised):
        return f"has {promised.__name__}() {'as' if inspect.iscoroutinefunction(given) else 'not as'} a coroutine"
    return ""


def _breaks(ours: list[Parameter], theirs: list[Parameter]) -> Iterator[bool]:
    """For each promise of a call, whether it is broken."""
    places = [parameter for parameter in ours if parameter.kind in BY_PLACE]
    names = {parameter.name: parameter for parameter in ours if parameter.kind in BY_NAME}
    any_place, any_name = (_has(ours, kind) for kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD))
    promised = [parameter for parameter in theirs if parameter.kind in BY_PLACE]
    used: set[str] = set()
    for number, parameter in enumerate(promised):
        place = places[number] if number < len(places) else None
        used |= {place.name} if place else set()
        yield place is None and not any_place
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            named = names.get(parameter.name)
            yield named is None and not any_name
            yield named is not None and place is not None and named is not place
        yield place is not None and _demands(place, parameter)
    for parameter in theirs:
        if parameter.kind is Parameter.KEYWORD_ONLY:
            named = names.get(parameter.name)
            used |= {parameter.name} if named else set()
            yield named is None and not any_name
            yield named is not None and _demands(named, parameter)
    yield _has(theirs, Parameter.VAR_POSITIONAL) and not any_place
    yield _has(theirs, Parameter.VAR_KEYWORD) and not any_name
    yield any(p.default is Parameter.empty and p.name not in used for p in ours if p.kind in (*BY_PLACE, *BY_NAME))


def _demands(ours: Parameter, theirs: Parameter) -> bool:
    """Whether we must be given what a caller may leave out."""
    return ours.default is Parameter.empty and theirs.default is not Parameter.empty


def _has(parameters: list[Parameter], kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in parameters)


def _shown(parameters: list[Parameter]) -> str:
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(bare))
    return text[1:-1]
