"""Whether a run resumes with the rows that it began with."""

import logging
from collections.abc import Mapping
from typing import Any

from drawloom.graph import UserError

log = logging.getLogger("drawloom.data")


def check_rows(then: Mapping[str, Any], now: Mapping[str, Any], *, accept_changes: bool) -> None:
    """
    Compare `rows` and `sha256` of each split, or of each source of a split, with those that a checkpoint has.

    Raises UserError if one differs, or logs it if changes are accepted; KeyError if these are not of a data set.
    """
    if not then.keys() & now.keys():
        raise KeyError(f"{', '.join(then)}: no split of these rows")
    differences = ", and ".join(filter(None, (_difference(name, then, now) for name in {**then, **now})))
    if differences and not accept_changes:
        raise UserError(
            f"the corpus is not the one that this run began with: {differences}; restore the old one, "
            "use another run name, or add --accept-changes",
            exit_code=2,
        )
    if differences:
        log.warning("the corpus is not the one that this run began with: %s", differences)


def _difference(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How rows differ from those that the run began with; empty if they do not."""
    if name not in then or name not in now:
        return f"{name} is {'new' if name in now else 'missing'}"
    before, after = then[name], now[name]
    if before["rows"] != after["rows"]:
        return f"{name} had {before['rows']} rows, and has {after['rows']}"
    return f"{name} had other tokens in its {before['rows']} rows" if before != after else ""
