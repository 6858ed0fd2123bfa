"""Agreement on the ranks that continue after a loss."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drawloom.components.distributed.survivors import Survivors, agree_on_survivors, choose_survivors


@pytest.mark.parametrize(
    ("lost", "fitting", "survivors"),
    [
        ({5}, {1, 2, 3}, [0, 2, 3, 4, 6, 7]),  # replica (1, 5) leaves as a whole
        ({5}, {1, 2, 4}, [0, 2, 4, 6]),  # three replicas can't share the work, and the last one leaves
        ({0, 1, 2}, {1, 2}, [3, 7]),
        ({0, 5, 2, 7}, {1, 2, 3, 4}, []),
        ({5}, set[int](), []),
    ],
)
def test_complete_replicas_that_fit_continue(lost: set[int], fitting: set[int], survivors: list[int]) -> None:
    """Replicas are columns of two pipeline stages of four ranks."""
    replicas = [[column, column + 4] for column in range(4)]
    assert choose_survivors(replicas, lost, fitting.__contains__) == survivors


def _agree(store: Any, rank: int, lost: list[int]) -> list[int]:
    return agree_on_survivors(store, rank, [[0], [1], [2], [3]], lambda _: True, lambda: {*lost}, lambda: False)


def test_live_ranks_agree_even_if_one_is_lost_meanwhile() -> None:
    """Rank 1 arrives and is then killed, and rank 2 never arrives; all live ranks get the same list."""
    store, lost = HashStore(), [3]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(_agree, store, rank, lost) for rank in (0, 1)]
        lost.append(2)
        zero, one = (answer.result(10) for answer in waiting)
    assert zero == one == [0, 1]
    assert _agree(store, 0, [1, 2, 3]) == [0, 1]  # the first proposal counts


def test_agreement_ends_when_it_is_over() -> None:
    """A rank waiting in vain for another one returns no survivors."""
    assert agree_on_survivors(HashStore(), 0, [[0], [1]], lambda _: True, set, lambda: True) == []


def test_survivors_are_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment describes the new launch."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    Survivors([0, 2, 5], "meeting").set_rank_variables(5)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "3")
