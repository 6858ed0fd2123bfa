"""
Hang diagnosis: when a rank times out, every rank reports the collective it is blocked in.

A thread in each process polls the store every quarter of a second for a request, and answers it whatever the main
thread is blocked in. The thread has a separate connection to the store, for a process that hangs may hold the lock
of the others.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.distributed.failure_monitor import Failure, FailureMonitor

log = logging.getLogger("drawloom.distributed")

TICK = 0.25  # seconds between two polls
LOST = "the rendezvous store, which is in rank 0 or in torchrun, does not answer"
ANSWER_TIMEOUT = 0.8  # seconds; several ticks, so that a live process answers in time


@attrs.frozen
class RankStatus:
    """
    Where a rank is, and the collective its main thread is blocked in (empty: none).

    `thread_blocked_in` is the collective that a background thread is blocked in.
    """

    location: str = ""
    blocked_in: str = ""
    thread_blocked_in: str = ""


@attrs.define(eq=False)
class HangMonitor:
    """
    Publishes what this rank is blocked in, and asks the other ranks when one times out.

    `store` is shared by all ranks (None: a single process); `location` is the step and phase, for messages;
    `blocked_in` the collective and the group of this rank; `lost` whether the store is gone. `failures` is polled in
    the same thread.
    """

    rank: int
    size: int
    store: Any = None
    failures: FailureMonitor | None = None
    location: str = ""
    blocked_in: tuple[str, str] | None = None
    lost: bool = False

    _closing: threading.Event = attrs.field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = attrs.field(init=False, default=None)
    _background: list["HangMonitor"] = attrs.field(init=False, factory=list)

    def for_thread(self) -> "HangMonitor":
        """A monitor on the same store for a background thread of this process."""
        other = attrs.evolve(self)
        self._background.append(other)
        return other

    def start(self) -> None:
        """Start to answer requests."""
        self._thread = threading.Thread(target=self._watch, name="hang-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop to answer requests."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(ANSWER_TIMEOUT)

    def diagnose(self) -> str:
        """
        Which ranks the others are waiting for, as a message; empty if unknown or if it is this rank.

        Takes about a second.
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
            # this process may be about to end, while the others are still asking for its status
            time.sleep(ANSWER_TIMEOUT)
            return ""
        return diagnosis(dict(answers), self.size)

    def _failure(self) -> Failure | None:
        return None if self.failures is None else self.failures.failure

    def _is_waited_for(self, answers: Mapping[int, RankStatus]) -> bool:
        """Whether other ranks are blocked and this one is not."""
        # with NCCL the GPU waits and no host thread, so that no rank counts as blocked
        waiting = {rank for rank, answer in answers.items() if answer.blocked_in or answer.thread_blocked_in}
        return bool(waiting) and self.rank not in waiting

    def _ask(self, answers: dict[int, RankStatus]) -> None:
        """Request the status of all ranks, and collect the answers until all are there or time is up."""
        try:
            # published at once: this process may end before the next poll of its own thread
            self._answer()
            self.store.set("requested", b"1")
            answers[self.rank] = self._status()
            end = time.monotonic() + ANSWER_TIMEOUT
            while len(answers) < self.size and time.monotonic() < end and self._failure() is None:
                for rank in range(self.size):
                    if rank not in answers and self.store.check([str(rank)]):
                        answers[rank] = RankStatus(**json.loads(self.store.get(str(rank))))
                time.sleep(TICK / 10)
        except RuntimeError as error:
            log.info("can't ask the other ranks: %s", error)
            self.lost = True

    def _answer(self) -> None:
        self.store.set(str(self.rank), json.dumps(attrs.asdict(self._status())))

    def _status(self) -> RankStatus:
        background = (_described(other.blocked_in) for other in self._background)
        return RankStatus(self.location, _described(self.blocked_in), next(filter(None, background), ""))

    def _watch(self) -> None:
        while not self._closing.wait(TICK):
            if self.failures is not None:
                self.failures.exit_if_overdue()
            if self.store is not None and not self.lost:
                self._poll()

    def _poll(self) -> None:
        """Answer a request, and check whether a rank has failed."""
        try:
            if self.store.check(["requested"]):
                self._answer()
            if self.failures is not None:
                self.failures.poll()
        except RuntimeError:
            self.lost = True


def diagnosis(answers: Mapping[int, RankStatus], size: int) -> str:
    """The ranks that do not answer; if all do, those in no collective; if all are in one, the collective of each."""
    if silent := [rank for rank in range(size) if rank not in answers]:
        return f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    busy = {rank: answer for rank, answer in answers.items() if not answer.blocked_in}
    busy = {rank: answer for rank, answer in busy.items() if not answer.thread_blocked_in} or busy
    if 0 < len(busy) < size:
        return "; ".join(f"rank {rank}{_at(answer)} {NOT_BLOCKED}" for rank, answer in sorted(busy.items()))
    return "; ".join(
        f"rank {rank}{_at(answer)} {answer.blocked_in or NOT_BLOCKED}" for rank, answer in sorted(answers.items())
    )


NOT_BLOCKED = "is not in a collective"


def _described(blocked_in: tuple[str, str] | None) -> str:
    return "waits for {} in group {}".format(*blocked_in) if blocked_in else ""


def _at(answer: RankStatus) -> str:
    return f" ({answer.location})" if answer.location else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
