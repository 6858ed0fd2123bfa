"""Who tells what ranks find before they have met."""

import contextlib
import io
import os
import warnings

import pytest

from drawloom.components.distributed.torchrun import rank_console
from support.processes import run_ranks


def _first(finding: tuple[int, ...]) -> bool | None:
    """Whether this rank tells what some ranks find; None if it is none of them."""
    console = rank_console()
    return console.is_first("a mistake") if int(os.environ["RANK"]) in finding else None


@pytest.mark.parametrize(
    ("finding", "first"), [((0, 1, 2), [True, False, False]), ((1,), [None, True, None]), ((0,), [True, None, None])]
)
def test_one_rank_tells_a_mistake(finding: tuple[int, ...], first: list[bool | None]) -> None:
    """Rank 0 if it finds it as well, which people look at; otherwise whoever finds it."""
    assert run_ranks(_first, 3, finding) == first


def _warned() -> tuple[bool, str]:
    console = rank_console()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.warn("take care", stacklevel=1)
    return console.warns, printed.getvalue()


def test_rank_0_alone_warns() -> None:
    """Of what all ranks know alike, Python's warnings among it."""
    zero, one = run_ranks(_warned, 2)
    assert zero[0] and "take care" in zero[1]
    assert one == (False, "")


def test_a_single_process_tells_everything() -> None:
    """There is nobody to ask."""
    [(warns, printed)] = run_ranks(_warned, 1, variables=False)
    assert warns and "take care" in printed
    assert rank_console().is_first("a mistake")


def test_variables_that_make_no_sense_silence_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with them is told later, by every process that has them."""
    monkeypatch.setenv("RANK", "x")
    assert rank_console().warns
