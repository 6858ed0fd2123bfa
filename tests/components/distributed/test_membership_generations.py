"""Agreement on the next generation, and spares in the store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generation import Generation, ReplicaShape, RunProcess
from drawloom.components.distributed.membership import Spares, agree_on_next_generation
from drawloom.components.distributed.preparation import Preparation

SPARES = [RunProcess("elsewhere", 100), RunProcess("elsewhere", 101)]
MEMBERS = Generation(
    "run", 0, [RunProcess("elsewhere", number) for number in range(4)], ReplicaShape(1, 1, 1, [1, 2, 3, 4])
)


def _agree(store: Any, rank: int, lost: list[int], is_over: bool = False) -> list[int]:
    following = agree_on_next_generation(
        MEMBERS, rank, store, Spares(store), lambda: dict.fromkeys(lost, "is gone"), lambda: is_over
    )
    assert following is None or following.number == 1
    return [member.pid for member in following.members] if following else []


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
    """A rank waiting in vain for another one returns no generation."""
    assert _agree(HashStore(), 0, [], is_over=True) == []


def test_spares_are_admitted_once_and_learn_the_end_of_the_run() -> None:
    """Of two spares the live one is admitted with its generation; others find the run's exit code."""
    store = HashStore()
    spares = Spares(store)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        spares.register(RunProcess(RunProcess.of_this_process().machine, process.pid))
    number = spares.register(RunProcess.of_this_process())
    assert spares.find_waiting_spares() == {number: RunProcess.of_this_process()}
    assert spares.find_admission(number) is None
    for rank in range(4):
        store.set(f"joined/{rank}", "1")
    assert _agree(store, 0, [2]) == [0, 1, 3, os.getpid()] and spares.find_waiting_spares() == {}
    generation = spares.find_admission(number)
    assert generation is not None and generation.members[3] == RunProcess.of_this_process()
    assert spares.find_exit_code() is None
    spares.announce_run_end(3)
    assert Spares(store).find_exit_code() == 3


def test_preparations_are_followed_once_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member publishes its modules again only if they are more; a member of the next generation, in any case."""
    prepared: list[Preparation] = []
    monkeypatch.setattr(Preparation, "prepare", lambda self, _gpus: prepared.append(self))
    store = HashStore()
    member, spare = Spares(store), Spares(store)
    spare.prepare_if_announced([])
    member.announce_preparation(["first", "second"], 10)
    member.announce_preparation(["fewer"], 20)
    spare.prepare_if_announced([])
    spare.prepare_if_announced([])
    Spares(store).announce_preparation(["other"], 30)
    spare.prepare_if_announced([])
    assert prepared == [Preparation(["first", "second"], 10), Preparation(["other"], 30)]


def test_known_spares_cost_one_question_each() -> None:
    """Rank 0 asks in every step, so that spares admitted long ago cost nothing."""
    questions: list[str] = []

    class CountingStore(HashStore):
        def check(self, keys: list[str]) -> bool:
            questions.extend(keys)
            return bool(super().check(keys))

    store = CountingStore()
    spares = Spares(store)
    numbers = [spares.register(spare) for spare in (*SPARES, *SPARES)]
    spares.announce_admission(numbers[:3], MEMBERS)
    assert spares.find_waiting_spares() == {numbers[3]: SPARES[1]}
    questions.clear()
    assert spares.find_waiting_spares() == {numbers[3]: SPARES[1]} and questions == [f"admitted/{numbers[3]}"]
