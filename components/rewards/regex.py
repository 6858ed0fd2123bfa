"""Reward for a format."""

import re
from collections.abc import Sequence
from functools import cached_property

from drawloom import component, setting
from drawloom.components.rewards.expected import Weighted
from drawloom.ports import Answer


def _describe_invalid_pattern(pattern: str) -> str | None:
    """Return why a pattern is not a regular expression, or None."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is not a regular expression: {error}"
    return None


@component
class Regex(Weighted):
    """1 for a completion in which a regular expression is found, else 0."""

    pattern: str = setting(
        r"regular expression (re, with DOTALL); \A and \Z anchor it to the whole completion",
        check=_describe_invalid_pattern,
    )

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        """The compiled regular expression, in which a dot also matches line ends."""
        return re.compile(self.pattern, re.DOTALL)

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [float(self._expression.search(answer.text) is not None) for answer in answers]
