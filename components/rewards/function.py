"""Rewards that are plain functions of a completion's text, marked with `@reward`."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, ClassVar

from drawloom import component, setting
from drawloom.components.rewards.expected import Weighted, require_key
from drawloom.graph import component_base_class
from drawloom.ports import Answer, Example

Score = float | None


@component_base_class
class FunctionReward(Weighted):
    """Base for rewards made from functions: `keys` are read from the example, and `options` are settings."""

    function: ClassVar[Callable[..., Score]]
    keys: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """Call the function for every answer. Raises UserError, with its source, for an example without a key."""
        call = partial(self.function, **{name: getattr(self, name) for name in self.options})
        for answer in answers:
            self.check_example(answer.example)
        return [call(answer.text, **{key: answer.example[key] for key in self.keys}) for answer in answers]

    def check_example(self, example: Example) -> None:
        """Raise UserError, with its source, for an example without a key."""
        for key in self.keys:
            require_key(example, key, f"add it, or give {key} a default in the reward")


OWN = {*dir(FunctionReward), *FunctionReward.__annotations__, *Weighted.__annotations__}
"""Names that every reward has."""


def reward(function: Callable[..., Score]) -> type[Any]:
    """
    Make a function a reward's component, which a recipe names like a class: by its file, or as `file.function`.

    The first parameter is the completion's text. Other parameters are keys of the prompt's example, or with a default
    settings in the recipe, beside `weight`. The function returns a score, or None for a completion without one.
    Raises TypeError for a function without a parameter for the text, for *args and **kwargs, and for a setting with
    the name of one that every reward has.
    """
    parameters = [*signature(function).parameters.values()]
    if not parameters or {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} & {one.kind for one in parameters}:
        raise TypeError(
            f"the reward {function.__name__} takes the completion's text, and then keys of the example by name; write "
            f"def {function.__name__}(completion, answer): ..."
        )
    others = parameters[1:]
    options = [one for one in others if one.default is not Parameter.empty]
    if taken := OWN & {one.name for one in options}:
        raise TypeError(f"the reward {function.__name__} has a setting {min(taken)} of its own; write another name")
    kinds = {one.name: function.__annotations__.get(one.name, type(one.default)) for one in options}
    body: dict[str, Any] = {
        "__module__": function.__module__,
        "__doc__": function.__doc__ or f"Reward by the function {function.__name__}.",
        "__annotations__": kinds,
        "function": staticmethod(function),
        "keys": tuple(one.name for one in others if one.default is Parameter.empty),
        "options": tuple(kinds),
        **{one.name: setting(f"the function's {one.name}", default=one.default) for one in options},
    }
    return component(type(function.__name__, (FunctionReward,), body))
