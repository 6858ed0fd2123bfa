"""Errors raised by every rank."""

import os
from typing import Any

import pytest

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.rank_errors import RankError, run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.graph import UserError
from support.processes import run_ranks


def _rank() -> int:
    return int(os.environ["RANK"])


def _fail(error: str) -> None:
    if error == "user":
        raise UserError("a sentence for people", exit_code=2)
    if error == "disk":
        raise OSError(28, "No space left on device", "/somewhere")
    raise ZeroDivisionError("a fault of the program")


def _outcomes(error: str, failing: int) -> tuple[str, str, int, list[Any], Any]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"))
    processes.open()
    world = processes.make_group("world", [[0, 1]])
    try:
        run_and_gather_on_all_ranks(world, lambda: _fail(error) if world.rank == failing else None)
        name, text, code = "", "", 0
    except Exception as caught:
        name, text, code = type(caught).__name__, str(caught), getattr(caught, "exit_code", 0)
    _, values = run_and_gather_on_all_ranks(world, lambda: object(), to_json=lambda _: [world.rank])
    said = run_on_rank0(world, lambda: f"by {world.rank}")
    processes.close()
    return name, text, code, values, said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_user_error_is_the_same_on_every_rank(failing: int) -> None:
    """All ranks raise the error of any rank with its text and exit code, and can communicate afterwards."""
    expected = ("RankError", "a sentence for people", 2, [[0], [1]], "by 0")
    assert run_ranks(_outcomes, 2, "user", failing) == [expected, expected]


def test_an_os_error_is_raised_with_rank_and_file() -> None:
    """A full disk on one rank raises on all, with that rank and the file in the message."""
    results = run_ranks(_outcomes, 2, "disk", 1)
    assert [result[:3] for result in results] == [("RankError", "rank 1: /somewhere: No space left on device", 1)] * 2


def test_a_bug_keeps_its_type_on_the_failing_rank() -> None:
    """The failing rank raises its own exception; the other ranks raise one naming it."""
    main, other = run_ranks(_outcomes, 2, "bug", 0)
    assert main[:2] == ("ZeroDivisionError", "a fault of the program")
    assert other[:2] == ("RankError", "rank 0: ZeroDivisionError: a fault of the program")


def test_messages_of_a_single_process_name_no_rank() -> None:
    """A single process returns its value and its shared value; its errors have no rank prefix."""
    assert run_and_gather_on_all_ranks(SingleProcess(), lambda: 3, to_json=str) == (3, ["3"])
    with pytest.raises(UserError, match=r"^/somewhere: No space left on device$"):
        run_on_rank0(SingleProcess(), lambda: _fail("disk"))


@pytest.mark.parametrize(("error", "code"), [("disk", 28), ("user", None)])
def test_agreed_errors_carry_the_errno(error: str, code: int | None) -> None:
    """The errno of a failed system call is kept, also when the error is raised through a second call."""
    with pytest.raises(RankError) as caught:
        run_on_rank0(SingleProcess(), lambda: run_on_rank0(SingleProcess(), lambda: _fail(error)))
    assert (caught.value.errno, caught.value.rank) == (code, 0)
