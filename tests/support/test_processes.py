"""The harness for several processes."""

import os
import signal
import sys
import time
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from support.processes import RanksFailedError, is_alive, run_ranks
from support.runs import Outcome, command


@attrs.frozen
class Parcel:
    """A class of a test module."""

    content: int


def _sum_of_ranks(parcel: Parcel) -> tuple[int, Parcel]:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total), Parcel(parcel.content + 1)


def _fail_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("a sentence of rank 1")
    return "fine"


def _die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def _run_and_list_imports(folder: Path) -> tuple[Outcome, list[str]]:
    before = {*sys.modules}
    return command(folder, ["run", "tiny.toml"], None), [name for name in sys.modules if name not in before]


def _sleep(file: str) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    with open(file, "a") as out:
        out.write(f"{os.getpid()} {child}\n")
    time.sleep(600)


def test_ranks_communicate_and_return_values_by_rank() -> None:
    """Ranks reach one another, and classes in the test module are pickled both ways."""
    assert run_ranks(_sum_of_ranks, 3, Parcel(1)) == [(3, Parcel(2))] * 3


def test_traceback_from_rank_is_raised() -> None:
    """An exception in a rank is raised with its text and line, and with the other rank's result."""
    with pytest.raises(RanksFailedError, match="a sentence of rank 1") as caught:
        run_ranks(_fail_on_rank_1, 2)
    assert list(caught.value.failures) == [1]
    assert "_fail_on_rank_1" in caught.value.failures[1]
    assert caught.value.values == {0: "fine"}


def test_error_names_the_killed_rank() -> None:
    """A silently killed rank is reported with its exit code."""
    with pytest.raises(RanksFailedError, match="rank 1: died with exit code -9"):
        run_ranks(_die_on_rank_1, 2)


def test_no_process_survives_timeout(tmp_path: object) -> None:
    """Hanging processes are killed with their children."""
    file = f"{tmp_path}/pids"
    with pytest.raises(RanksFailedError, match="not done after 1"):
        run_ranks(_sleep, 2, file, timeout=1)
    with open(file) as lines:
        pids = [int(word) for word in lines.read().split()]
    assert len(pids) == 4
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in pids)


def test_a_run_imports_no_module_of_drawloom(folder: Path) -> None:
    """The fork server has imported all of them: each import in a rank is repeated in thousands of processes."""
    [(outcome, imported)] = run_ranks(_run_and_list_imports, 1, folder, variables=False)
    assert outcome.code == 0 and not [name for name in imported if name.startswith("drawloom")]
