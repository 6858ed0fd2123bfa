"""Patterns of the names of modules and parameters."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern matches a name, or the end of one after a dot: `q_proj`, `layers.[0-3].mlp.*`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def matching(name: str, patterns: Iterable[str]) -> list[str]:
    """The patterns that match a name."""
    return [pattern for pattern in patterns if matches(name, pattern)]


def no_pattern(patterns: Iterable[str]) -> str | None:
    """The reason why patterns are invalid, or None: there is at least one, and none is empty."""
    given = list(patterns)
    if not given:
        return "an empty list adapts nothing; name at least one module"
    return None if all(given) else "an empty name matches nothing; write the name of a module"
