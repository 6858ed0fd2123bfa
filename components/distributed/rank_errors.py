"""Work of which every rank learns the outcome, so that an error on one is an error on all and none waits for ever."""

from collections.abc import Callable
from typing import Any

from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError


class Agreed(UserError):
    """An error that every rank of a group raises; `rank` is the one in which it arose."""

    def __init__(self, message: str, exit_code: int, rank: int) -> None:
        super().__init__(message, exit_code)
        self.rank = rank


def run_on_all(group: Group, work: Callable[[], Any]) -> list[Any]:
    """
    What `work` gave on each rank, as JSON carries it, by rank, on every rank.

    If it raised on any, every rank raises Agreed with the words of the first of them, and the rank on which something
    else than a UserError or an OSError was raised raises that.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = error
    outcomes = group.gather_json({"value": value, "failure": _told(failure, group)})
    for rank, outcome in enumerate(outcomes):
        if outcome["failure"]:
            if failure is not None and not isinstance(failure, UserError | OSError):
                raise failure
            raise Agreed(**outcome["failure"], rank=rank) from failure
    return [outcome["value"] for outcome in outcomes]


def run_on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """What `work` gave on the main rank, the only one that does it, as JSON carries it, on every rank."""
    return run_on_all(group, work if group.rank == 0 else _nothing)[0]


def _nothing() -> None:
    """What the other ranks do meanwhile."""


def _told(error: Exception | None, group: Group) -> dict[str, Any] | None:
    """An error, as the arguments of a UserError."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return {"message": str(error), "exit_code": error.exit_code}
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, OSError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return {"message": text if group.size == 1 else f"rank {group.rank}: {text}", "exit_code": 1}
