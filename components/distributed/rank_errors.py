"""Running something on every rank, so that an error on one is an error on all, and none waits for ever."""

from collections.abc import Callable
from typing import Any, TypeVar

from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError

T = TypeVar("T")


class Agreed(UserError):
    """An error that every rank of a group raises: that of `rank`, with the `errno` of the system call if one failed."""

    def __init__(self, message: str, exit_code: int, rank: int, errno: int | None = None) -> None:
        super().__init__(message, exit_code)
        self.rank = rank
        self.errno = errno


def _nothing(_value: Any = None) -> None:
    """Shares nothing; or does nothing, on the ranks that have nothing to do."""


def run_on_all(group: Group, work: Callable[[], T], share: Callable[[T], Any] = _nothing) -> tuple[T, list[Any]]:
    """
    What `work` gave on this rank, and what `share` makes of each rank's, by rank, as JSON carries it.

    If either raised on any rank, every rank raises Agreed with the message of the first of them; a rank on which
    something other than a UserError or an OSError was raised raises that.
    """
    failure: Exception | None = None
    try:
        value = work()
        shared = share(value)
    except Exception as error:
        failure, shared = error, None
    outcomes = group.gather_json({"shared": shared, "failure": _described(failure, group)})
    for rank, outcome in enumerate(outcomes):
        if outcome["failure"]:
            if failure is not None and not isinstance(failure, UserError | OSError):
                raise failure
            raise Agreed(**outcome["failure"], rank=rank) from failure
    return value, [outcome["shared"] for outcome in outcomes]


def run_on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """What `work` gave on rank 0, the only one that runs it, on every rank, as JSON carries it."""
    _, shared = run_on_all(group, work if group.rank == 0 else _nothing, lambda value: value)
    return shared[0]


def _described(error: Exception | None, group: Group) -> dict[str, Any] | None:
    """An error as the arguments of Agreed; any but a UserError is told with the rank on which it arose."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return {"message": str(error), "exit_code": error.exit_code, "errno": getattr(error, "errno", None)}
    text, code = f"{type(error).__name__}: {error}", None
    if isinstance(error, OSError):
        text, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), error.errno or 0
    return {"message": text if group.size == 1 else f"rank {group.rank}: {text}", "exit_code": 1, "errno": code}
