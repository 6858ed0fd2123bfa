"""Calls on every rank, whose errors are raised on all ranks, so no rank is left waiting."""

from collections.abc import Callable
from typing import Any, TypeVar

from drawloom import UserError
from drawloom.ports import Group

T = TypeVar("T")


class RankError(UserError):
    """The error of `rank`, raised on every rank of a group; `errno` is set if a system call failed."""

    def __init__(self, message: str, exit_code: int, rank: int, errno: int | None = None) -> None:
        super().__init__(message, exit_code)
        self.rank = rank
        self.errno = errno


def _do_nothing(_value: Any = None) -> None:
    """Return None: the default for `to_json`, and the work on ranks other than 0 in run_on_rank0."""


def run_and_gather_on_all_ranks(
    group: Group, work: Callable[[], T], to_json: Callable[[T], Any] = _do_nothing
) -> tuple[T, list[Any]]:
    """
    Run `work` on every rank; return this rank's result, and every rank's `to_json(result)`, by rank, gathered as JSON.

    If `work` or `to_json` raises on any rank, every rank raises RankError with the first failing rank's message; a rank
    whose own exception is neither a UserError nor an OSError raises that exception.
    """
    failure: Exception | None = None
    try:
        value = work()
        shared = to_json(value)
    except Exception as error:
        failure, shared = error, None
    outcomes = group.gather_json(
        {"shared": shared, "failure": failure and _convert_to_rank_error_arguments(failure, group)}
    )
    for rank, outcome in enumerate(outcomes):
        if outcome["failure"]:
            # a bug keeps its type and its traceback on the rank where it happened
            if failure is not None and not isinstance(failure, UserError | OSError):
                raise failure
            raise RankError(**outcome["failure"], rank=rank) from failure
    return value, [outcome["shared"] for outcome in outcomes]


def run_on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 only, and return its result on every rank, sent as JSON. Errors as on all ranks."""
    _, shared = run_and_gather_on_all_ranks(group, work if group.rank == 0 else _do_nothing, lambda value: value)
    return shared[0]


def _convert_to_rank_error_arguments(error: Exception, group: Group) -> dict[str, Any]:
    """
    Convert an error to RankError's arguments; messages other than a UserError's begin with the rank.
    """
    if isinstance(error, UserError):
        return {
            "message": str(error),
            "exit_code": error.exit_code,
            "errno": error.errno if isinstance(error, RankError) else None,
        }
    text, code = f"{type(error).__name__}: {error}", None
    if isinstance(error, OSError):
        text, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), error.errno or 0
    return {"message": text if group.size == 1 else f"rank {group.rank}: {text}", "exit_code": 1, "errno": code}
