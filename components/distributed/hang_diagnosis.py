"""
Who is still there: what each process says of itself when one of them calls the roll.

A thread in each process looks every quarter of a second whether the roll was called, and answers, whatever its main
thread is doing or waiting for. The roll lies in a store of torch, at the process that keeps the addresses of all: it is
called over a connection of its own, for a process that hangs may hold the others.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.distributed.failure_monitor import Alarm, Failure

log = logging.getLogger("drawloom.distributed")

TICK = 0.25  # seconds between two looks
LOST = "the process that keeps the addresses of all does not answer, which is rank 0 or torchrun"
ANSWER_TIMEOUT = 0.8  # seconds in which a process that is there answers


@attrs.frozen
class RankStatus:
    """
    Where a process is, and in which deed it waits for others; empty if in none. `beside` is in which deed a thread
    waits that works beside the main one.
    """

    place: str = ""
    blocked_in: str = ""
    beside: str = ""


@attrs.define(eq=False)
class HangMonitor:
    """
    The roll of some processes, as one of them sees it. `store` keeps it; a single process has none.

    `place` is where this process is, in words for the others; `waits` the deed and the group in which it waits for
    them; `lost` whether the store is gone. `alarm` is looked at as often as the roll.
    """

    rank: int
    size: int
    store: Any = None
    alarm: Alarm | None = None
    place: str = ""
    blocked_in: tuple[str, str] | None = None
    lost: bool = False

    _closing: threading.Event = attrs.field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = attrs.field(init=False, default=None)
    _beside: list["HangMonitor"] = attrs.field(init=False, factory=list)

    def beside(self) -> "HangMonitor":
        """The same roll for what another thread of this process waits for."""
        other = attrs.evolve(self)
        self._beside.append(other)
        return other

    def start(self) -> None:
        """Answer from now on."""
        self._thread = threading.Thread(target=self._watch, name="roll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(ANSWER_TIMEOUT)

    def diagnose(self) -> str:
        """
        Who keeps the others waiting, in words, as far as it can be known; empty if it can't, or if this process waits
        for nobody. It takes a second.
        """
        if self.store is None:
            return ""
        answers: dict[int, RankStatus] = {}
        asking = threading.Thread(target=self._ask, args=(answers,), daemon=True)  # the store may hang as well
        asking.start()
        asking.join(ANSWER_TIMEOUT + TICK)
        if failure := self._failure():
            return failure.text
        if self.lost or not answers:
            return LOST
        if len(answers) == self.size and self._is_waited_for(answers):
            time.sleep(ANSWER_TIMEOUT)  # this process may be about to end, and the others about to ask where it is
            return ""
        return diagnosis(dict(answers), self.size)

    def _failure(self) -> Failure | None:
        return None if self.alarm is None else self.alarm.failure

    def _is_waited_for(self, answers: Mapping[int, RankStatus]) -> bool:
        """Whether others wait and this rank does not. Where a GPU waits and no host, nobody is known to wait."""
        waiting = {rank for rank, answer in answers.items() if answer.blocked_in or answer.beside}
        return bool(waiting) and self.rank not in waiting

    def _ask(self, answers: dict[int, RankStatus]) -> None:
        try:
            self._answer()
            self.store.set("called", b"1")
            answers[self.rank] = self._own()
            end = time.monotonic() + ANSWER_TIMEOUT
            while len(answers) < self.size and time.monotonic() < end and self._failure() is None:
                for rank in range(self.size):
                    if rank not in answers and self.store.check([str(rank)]):
                        answers[rank] = RankStatus(**json.loads(self.store.get(str(rank))))
                time.sleep(TICK / 10)
        except RuntimeError as error:
            log.info("the roll can't be called: %s", error)
            self.lost = True

    def _answer(self) -> None:
        self.store.set(str(self.rank), json.dumps(attrs.asdict(self._own())))

    def _own(self) -> RankStatus:
        beside = (_words(other.blocked_in) for other in self._beside)
        return RankStatus(self.place, _words(self.blocked_in), next(filter(None, beside), ""))

    def _watch(self) -> None:
        while not self._closing.wait(TICK):
            if self.alarm is not None:
                self.alarm.expire()
            if self.store is not None and not self.lost:
                self._look()

    def _look(self) -> None:
        """Answer if the roll was called, and see whether a rank has failed."""
        try:
            if self.store.check(["called"]):
                self._answer()
            if self.alarm is not None:
                self.alarm.look()
        except RuntimeError:
            self.lost = True


def diagnosis(answers: Mapping[int, RankStatus], size: int) -> str:
    """Who does not answer; if all do, who waits for nobody; if all wait, for what each does."""
    if silent := [rank for rank in range(size) if rank not in answers]:
        return f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    busy = {rank: answer for rank, answer in answers.items() if not answer.blocked_in}
    busy = {rank: answer for rank, answer in busy.items() if not answer.beside} or busy
    if 0 < len(busy) < size:
        return "; ".join(f"rank {rank}{_at(answer)} waits for nobody" for rank, answer in sorted(busy.items()))
    told = (
        f"rank {rank}{_at(answer)} {answer.blocked_in or 'waits for nobody'}"
        for rank, answer in sorted(answers.items())
    )
    return "; ".join(told)


def _words(waits: tuple[str, str] | None) -> str:
    return "waits for {} in group {}".format(*waits) if waits else ""


def _at(answer: RankStatus) -> str:
    return f" ({answer.place})" if answer.place else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
