"""Many names in one sentence."""

from collections.abc import Sequence

SHOWN = 10


def format_names(names: Sequence[str]) -> str:
    """The names, or the first of them and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
