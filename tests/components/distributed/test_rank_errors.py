"""Errors that every rank raises."""

import os
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.rank_errors import Agreed, run_on_all, run_on_rank0, run_once_a_host
from drawloom.graph import UserError
from support.joined import joined
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
    world = processes.group("world", [[0, 1]])
    try:
        run_on_all(world, lambda: _fail(error) if world.rank == failing else None)
        name, text, code = "", "", 0
    except Exception as caught:
        name, text, code = type(caught).__name__, str(caught), getattr(caught, "exit_code", 0)
    _, values = run_on_all(world, lambda: object(), share=lambda _: [world.rank])
    said = run_on_rank0(world, lambda: f"by {world.rank}")
    processes.close()
    return name, text, code, values, said


def _once_a_host(folder: Path) -> tuple[list[bool], str]:
    """Four ranks of two hosts: whether this one is the first of a host in some groups, and a host's error."""
    os.environ |= {"GROUP_RANK": str(_rank() // 2), "GROUP_WORLD_SIZE": "2"}
    with joined() as (processes, _):
        groups = [
            processes.group("world", [[0, 1, 2, 3]]),
            processes.group("across", [[0, 2], [1, 3]]),
            processes.group("three", [[0], [1, 2, 3]]),
        ]
        run_once_a_host(groups[0], (folder / str(processes.rank)).touch)
        there = {path.name for path in folder.iterdir()}
        try:
            run_once_a_host(groups[0], lambda: _fail("user") if processes.rank == 2 else None)
        except UserError as error:
            return [group.is_first_on_host for group in groups] + [there == {"0", "2"}], str(error)
    return [], ""


def test_work_is_done_once_a_host(tmp_path: Path) -> None:
    """One rank of each host works, all ranks wait for both, and an error of the second host is raised on every rank."""
    error = "a sentence for people"
    assert run_ranks(_once_a_host, 4, tmp_path) == [
        ([True, True, True, True], error),
        ([False, True, True, True], error),
        ([True, True, True, True], error),
        ([False, True, False, True], error),
    ]
    run_once_a_host(SingleProcess(), (tmp_path / "alone").touch)
    assert (tmp_path / "alone").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_user_error_is_the_same_on_every_rank(failing: int) -> None:
    """All ranks raise the error of any rank with its text and exit code, and can communicate afterwards."""
    expected = ("Agreed", "a sentence for people", 2, [[0], [1]], "by 0")
    assert run_ranks(_outcomes, 2, "user", failing) == [expected, expected]


def test_an_os_error_is_raised_with_rank_and_file() -> None:
    """A full disk on one rank raises on all, with that rank and the file in the message."""
    results = run_ranks(_outcomes, 2, "disk", 1)
    assert [result[:3] for result in results] == [("Agreed", "rank 1: /somewhere: No space left on device", 1)] * 2


def test_a_bug_keeps_its_type_on_the_failing_rank() -> None:
    """The failing rank raises its own exception; the other ranks raise one that names it."""
    main, other = run_ranks(_outcomes, 2, "bug", 0)
    assert main[:2] == ("ZeroDivisionError", "a fault of the program")
    assert other[:2] == ("Agreed", "rank 0: ZeroDivisionError: a fault of the program")


def test_messages_of_a_single_process_name_no_rank() -> None:
    """A single process returns its value and what it shares; its errors have no rank prefix."""
    assert run_on_all(SingleProcess(), lambda: 3, share=str) == (3, ["3"])
    with pytest.raises(UserError, match=r"^/somewhere: No space left on device$"):
        run_on_rank0(SingleProcess(), lambda: _fail("disk"))


@pytest.mark.parametrize(("error", "code"), [("disk", 28), ("user", None)])
def test_agreed_errors_carry_the_errno(error: str, code: int | None) -> None:
    """The errno of a failed system call is kept, also when the error is raised through a second call."""
    with pytest.raises(Agreed) as caught:
        run_on_rank0(SingleProcess(), lambda: run_on_rank0(SingleProcess(), lambda: _fail(error)))
    assert (caught.value.errno, caught.value.rank) == (code, 0)
