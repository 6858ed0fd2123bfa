"""The choice of one rank to print problems before the process group exists."""

import contextlib
import io
import os
import warnings

import pytest

from drawloom.components.distributed import rank_console
from drawloom.components.distributed.rank_console import create_rank_console
from support.processes import run_ranks


def _is_first(failing: tuple[int, ...]) -> bool | None:
    """Return whether this rank prints a problem on these ranks; None if it is not among them."""
    rank_console.STORE_TIMEOUT = 30.0  # on a busy machine the store takes longer; then each rank would print it
    console = create_rank_console()
    return console.is_first("a mistake") if int(os.environ["RANK"]) in failing else None


@pytest.mark.parametrize(
    ("failing", "first"), [((0, 1, 2), [True, False, False]), ((1,), [None, True, None]), ((0,), [True, None, None])]
)
def test_one_rank_prints_a_failure(failing: tuple[int, ...], first: list[bool | None]) -> None:
    """Rank 0 prints the failure if it fails as well, otherwise the failing rank."""
    assert run_ranks(_is_first, 3, failing) == first


def _warn_on_console() -> tuple[bool, str]:
    console = create_rank_console()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.warn("take care", stacklevel=1)
    return console.warns, printed.getvalue()


def test_only_rank_0_prints_warnings() -> None:
    """Python's warnings are printed by rank 0 alone."""
    zero, one = run_ranks(_warn_on_console, 2)
    assert zero[0] and "take care" in zero[1]
    assert one == (False, "")


def test_a_single_process_prints_everything() -> None:
    """Without torchrun's variables, the process prints warnings and failures."""
    [(warns, printed)] = run_ranks(_warn_on_console, 1, variables=False)
    assert warns and "take care" in printed
    assert create_rank_console().is_first("a mistake")


def test_invalid_variables_do_not_silence_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With unreadable variables, every process prints; they are reported when the run opens."""
    monkeypatch.setenv("RANK", "x")
    assert create_rank_console().warns
