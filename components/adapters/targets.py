"""Patterns for module and parameter names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern, such as `layers.[0-3].mlp.*`, matches a name or its end after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def list_matching_patterns(name: str, patterns: Iterable[str]) -> list[str]:
    """Return the patterns matching a name."""
    return [pattern for pattern in patterns if matches(name, pattern)]


def find_pattern_fault(patterns: Iterable[str]) -> str | None:
    """Return why patterns are invalid (there is none, or an empty one), or None if they are valid."""
    listed = list(patterns)
    if not listed:
        return "an empty list adapts nothing; name at least one module"
    return None if all(listed) else "an empty name matches nothing; write the name of a module"
