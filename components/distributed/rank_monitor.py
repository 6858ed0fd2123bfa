"""
Status exchange among a launch's ranks: the operation that blocks a rank, and the first failure.

A thread in every process polls the launch's store four times a second, even if the main thread is blocked. It has a
separate connection to the store, because a hanging process may hold other connections' locks.

When a rank times out, it requests all ranks' status, and every rank reports the collective that blocks it.

The first failure of any rank ends every rank, and is printed once: the first rank to set it in the store prints it, and
the others end silently. A process still busy after its grace period is killed: a gloo collective can't be interrupted
from another thread, and with NCCL no host thread waits where it could be interrupted. A killed process sets no failure;
the other processes on its machine notice its death by a pidfd, which then becomes readable.

If the run survives losses, such a death is no failure: it is published as a loss, and every rank calls `on_loss`. A
rank is lost, too, if its process is stopped (SIGSTOP), if it sends no heartbeats, or if the others wait for it beyond
their timeout. A lost rank never comes back: its machine's other processes kill it, and its own monitor ends it.
"""

import json
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import attrs

from drawloom import UserError, internal
from drawloom.components.distributed.error_file import write_torchrun_error_file
from drawloom.components.distributed.launch_store import Failure, call_store_with_timeout, claim_first_failure
from drawloom.components.distributed.peer_processes import PeerProcesses
from drawloom.components.distributed.rank_errors import RankError
from drawloom.graph.cli.terminal import print_escaped_text

NOT_BLOCKED = "is not in a collective"


@attrs.frozen
class RankStatus:
    """
    Rank status: its location, and the collective that blocks its main thread ("" for none).

    `thread_blocked_in` is the collective that blocks a background thread.
    """

    location: str = ""
    blocked_in: str = ""
    thread_blocked_in: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether any thread is blocked in a collective."""
        return bool(self.blocked_in or self.thread_blocked_in)


def is_waited_for(rank: int, answers: Mapping[int, RankStatus]) -> bool:
    """Return whether other ranks are blocked and this one is not."""
    # with NCCL the GPU waits and no host thread, so that no rank counts as blocked
    return not answers[rank].is_blocked and any(answer.is_blocked for answer in answers.values())


def format_hang_diagnosis(answers: Mapping[int, RankStatus], size: int) -> str:
    """Name the ranks without an answer; without any, the ranks outside collectives; else every rank's collective."""
    if silent := [rank for rank in range(size) if rank not in answers]:
        return f"{_format_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    busy = {rank: answer for rank, answer in answers.items() if not answer.blocked_in}
    busy = {rank: answer for rank, answer in busy.items() if not answer.thread_blocked_in} or busy
    if 0 < len(busy) < size:
        return "; ".join(
            f"rank {rank}{_format_location(answer)} {NOT_BLOCKED}" for rank, answer in sorted(busy.items())
        )
    return "; ".join(
        f"rank {rank}{_format_location(answer)} {answer.blocked_in or NOT_BLOCKED}"
        for rank, answer in sorted(answers.items())
    )


def _format_location(answer: RankStatus) -> str:
    """Return a rank's step and phase in parentheses, or "" if unknown."""
    return f" ({answer.location})" if answer.location else ""


def _format_ranks(ranks: list[int]) -> str:
    """Return `rank 3`, or `ranks 1, 3` if there are several."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


log = logging.getLogger("drawloom.distributed")

TICK = 0.25  # seconds between two polls
STORE_LOST = "the rendezvous store, which is in rank 0 or in torchrun, does not answer"
ANSWER_TIMEOUT = 0.8  # seconds; several ticks, so that a live process answers in time
KILLED = "is gone: it was killed, or it crashed"
STOPPED = "is stopped (SIGSTOP)"
GRACE = 3.0  # seconds in which a process may close its resources after a rank has failed
BEAT = 1.0  # seconds between two heartbeats
MAX_WATCHED = 16  # ranks whose heartbeats a rank reads: more than a machine's processes, which may be lost together
KILL_TIMEOUT = 10.0  # seconds for a killed process to end
STORE_TIMEOUT = 1.0  # seconds for the store to answer, and for a better informed rank to report first


@attrs.define(eq=False)
class RankMonitor:
    """
    Monitor that publishes this rank's status and failure, and reads the other ranks'.

    `store` is shared by all ranks (None: a single process). `peers` are the other ranks' process ids on this machine,
    by rank, and `where` names the machine if there are several. `location` is the step and phase, for messages.
    `is_lost` is True if the store is gone. With `on_loss`, lost ranks are collected in `losses` with the reason, and do
    not end the others; the monitor's thread calls `on_loss` at every poll from the first loss on. A rank is lost after
    `heartbeat_timeout` seconds without a heartbeat. `is_broken` is True from the first loss on. `is_recovering` is True
    while this rank waits for an agreement on a loss. The constructing thread is the main thread.
    """

    rank: int = 0
    size: int = 1
    store: Any = None
    peers: Mapping[int, int] = attrs.field(factory=dict)
    error_file: str = ""
    where: str = ""
    exit: Callable[[int], object] = os._exit
    location: str = ""
    failure: Failure | None = None
    is_lost: bool = False
    on_loss: Callable[[], object] | None = None
    heartbeat_timeout: float = math.inf
    losses: Mapping[int, str] = attrs.field(factory=dict)
    is_broken: bool = False
    is_recovering: bool = False

    _main: int = internal(factory=threading.get_ident)
    _blocked: dict[int, str] = internal(factory=dict)  # by thread
    _lock: threading.Lock = internal(factory=threading.Lock)
    _deadline: float = internal(math.inf)
    _processes: PeerProcesses = internal(factory=PeerProcesses)
    _heard: dict[int, tuple[int, float]] = internal(factory=dict)  # heartbeats, and seconds since
    _beaten: float = internal(-math.inf)
    _closing: threading.Event = internal(factory=threading.Event)
    _thread: threading.Thread | None = internal(None)

    def start(self) -> None:
        """Watch the peers' processes, and start to answer requests."""
        self.watch_local_peer_processes()
        self._thread = threading.Thread(target=self._poll_store_until_closed, name="rank-monitor", daemon=True)
        self._thread.start()

    def watch_local_peer_processes(self) -> None:
        """Watch the peers' processes; without pidfds (not Linux) a peer's death is not noticed."""
        self._processes = PeerProcesses(self.peers)
        self._processes.open()

    def close(self) -> None:
        """Stop answering requests and watching processes; a failure no longer kills this process."""
        self.stop_polling()
        self._deadline = math.inf
        self._processes.close()

    def stop_polling(self) -> None:
        """Send no more heartbeats, and find no more losses: other ranks may have left this generation already."""
        self._closing.set()
        self._processes.end_all_waits()
        if self._thread is not None:
            self._thread.join(ANSWER_TIMEOUT)

    @contextmanager
    def mark_blocked(self, operation: str, group: str) -> Iterator[None]:
        """Mark this thread as blocked in a group's operation."""
        self._blocked[threading.get_ident()] = f"waits for {operation} in group {group}"
        try:
            yield
        finally:
            self._blocked.pop(threading.get_ident(), None)

    def describe_ranks_to_blame(self) -> str:
        """
        Return a message with the ranks for which others wait; "" if unknown, or if it is this rank.

        Takes about a second.
        """
        if self.store is None:
            return ""
        answers = self._request_all_statuses()
        if self.failure is not None:
            return self.failure.text
        if self.losses:
            return self.describe_lost_ranks()
        if self.is_lost or not answers:
            return STORE_LOST
        if len(answers) == self.size and is_waited_for(self.rank, answers):
            # this process may be about to end, while the others are still asking for its status
            time.sleep(ANSWER_TIMEOUT)
            return ""
        return format_hang_diagnosis(dict(answers), self.size)

    def declare_awaited_ranks_lost(self) -> frozenset[int]:
        """
        Declare the ranks lost for which all others wait in a collective, and return them; none if it is unclear.

        Takes about a second. Without a heartbeat, a rank's silence is not enough: it may be slow for a moment.
        """
        answers = self._request_all_statuses()
        if self.failure is not None or self.losses or len(answers) < self.size:
            return frozenset()
        busy = {rank: answer for rank, answer in answers.items() if not answer.blocked_in}
        if len(busy) == self.size:
            return frozenset()
        with suppress(RuntimeError):  # the store is gone, and the monitor's thread notices it, too
            self.declare_lost({rank: f"hangs in {answer.location or 'Python'}" for rank, answer in busy.items()})
        return frozenset(busy)

    def declare_lost(self, reasons: Mapping[int, str]) -> None:
        """Publish ranks as lost, each with a reason. Raises RuntimeError if the store is gone."""
        for rank, reason in reasons.items():
            self.store.compare_set(f"lost/{rank}", "", reason)
            self.store.set("broken", b"1")

    def find_published_loss(self) -> bool:
        """
        Return whether a rank is lost; ask the store, because this rank's next poll may be late.

        Raises RuntimeError if the store is gone.
        """
        if not self.is_broken and self.store is not None and self.store.check(["broken"]):
            while not (self.is_broken or self.is_lost or self._closing.is_set()):
                time.sleep(TICK / 10)
        return self.is_broken

    def wait_until_lost_processes_end(self) -> None:
        """
        Wait until lost processes on this machine, which are killed, have ended, so that their files are unlocked.

        A process with much memory takes a moment to end. Gives up after KILL_TIMEOUT seconds.
        """
        self._processes.wait_until_ended(self.losses, KILL_TIMEOUT)

    def announce_exit(self) -> None:
        """Announce that this process is about to end normally, so its peers don't report its death."""
        if self.store is not None:
            call_store_with_timeout(STORE_TIMEOUT, lambda: self.store.set(f"exiting/{self.rank}", b"1"))

    def report_failure(self, text: str, exit_code: int = 1, trace: str = "") -> Failure:
        """Report this rank's failure to all ranks, and print it if it is the first; return the first failure."""
        own_failure = Failure(self.rank, text, exit_code)
        with self._lock:
            is_first = self.failure is None
            claimed = self.failure or call_store_with_timeout(
                STORE_TIMEOUT, lambda: claim_first_failure(self.store, own_failure)
            )
            failure = claimed or own_failure
            self._keep_and_write_first_failure(failure)
        if log.hasHandlers():
            log.error("%s", f"{trace}{text}", extra={"printed": True})
        if is_first and failure == own_failure:
            print_escaped_text(f"{trace}{text}", "stderr")
        return failure

    def report_exception(self, error: Exception) -> Failure:
        """Report an exception raised at this rank's location; return the first failure."""
        if isinstance(error, RankError) and error.rank != self.rank:
            # the rank that raised it has the traceback
            self._wait_until_failure_is_known(STORE_TIMEOUT)
        if isinstance(error, UserError):
            return self.report_failure(self._format_error(error), error.exit_code)
        return self.report_failure(self._format_error(error), trace="".join(traceback.format_exception(error)))

    def poll_and_report_losses(self) -> None:
        """Check whether a rank has failed or died. Raises RuntimeError if the store is gone."""
        if self.failure is None and self.store.check(["failure"]):
            failure = Failure(**json.loads(self.store.get("failure")))
            with self._lock:
                self._keep_and_write_first_failure(failure)
            log.info("%s; rank %d ends because of it", failure.text, self.rank)
        dead = [] if self.failure else self._find_dead_local_ranks()
        if self.on_loss is not None:
            silent = [] if self.failure else self._beat_and_find_silent()
            stopped = [] if self.failure else self._processes.find_stopped()
            silence = f"has sent no heartbeat for {self.heartbeat_timeout:g} s"
            # Publish lost ranks, read the other ranks' findings, end all lost processes, and call `on_loss`
            reasons = dict.fromkeys(silent, silence) | dict.fromkeys(stopped, STOPPED) | dict.fromkeys(dead, KILLED)
            self.declare_lost({rank: reason for rank, reason in reasons.items() if rank not in self.losses})
            if self.store.check(["broken"]):
                lost = [rank for rank in range(self.size) if self.store.check([f"lost/{rank}"])]
                self.losses = {rank: self.store.get(f"lost/{rank}").decode() for rank in lost}
                self.is_broken = True
                self._kill_lost_processes()
                assert self.on_loss is not None
                self.on_loss()
        elif dead:
            self.report_failure(self._describe_lost_rank(dead[0], KILLED))

    def describe_lost_ranks(self) -> str:
        """Return a message naming the lost ranks."""
        return "; ".join(self._describe_lost_rank(rank, reason) for rank, reason in sorted(self.losses.items()))

    def exit_if_grace_period_is_over(self) -> None:
        """Kill this process if a rank has failed and the grace period is over."""
        if self.failure and time.monotonic() > self._deadline:
            self.exit(self.failure.exit_code)

    def _poll_store_until_closed(self) -> None:
        """Answer requests and check for failures until `close`; runs in the monitor's thread."""
        while not self._closing.is_set():
            self._processes.wait_for_change(TICK, looks_for_stops=self.on_loss is not None)
            if self._closing.is_set():
                return
            self.exit_if_grace_period_is_over()
            try:
                if not self.is_lost and self.store.check(["requested"]):
                    self._publish_status()
                if not self.is_lost:
                    self.poll_and_report_losses()
            except RuntimeError as error:
                self.is_lost = True
                log.info("%s; this rank no longer notices losses: %s", STORE_LOST, error)

    def _request_all_statuses(self) -> dict[int, RankStatus]:
        """Return the status of all ranks that answer in time; none if the store is gone."""
        answers: dict[int, RankStatus] = {}
        # In a thread, because the store may hang as well.
        asking = threading.Thread(target=self._collect_statuses, args=(answers,), daemon=True)
        asking.start()
        asking.join(ANSWER_TIMEOUT + TICK)
        return answers

    def _collect_statuses(self, answers: dict[int, RankStatus]) -> None:
        """Request all ranks' status, and add it to `answers` until they are complete or time is up."""
        try:
            # published at once: this process may end before the next poll of its own thread
            self._publish_status()
            self.store.set("requested", b"1")
            answers[self.rank] = self._build_own_status()
            end = time.monotonic() + ANSWER_TIMEOUT
            while len(answers) < self.size and time.monotonic() < end and not (self.failure or self.losses):
                for rank in range(self.size):
                    if rank not in answers and self.store.check([str(rank)]):
                        answers[rank] = RankStatus(**json.loads(self.store.get(str(rank))))
                time.sleep(TICK / 10)
        except RuntimeError as error:
            log.info("can't ask the other ranks: %s", error)
            self.is_lost = True

    def _publish_status(self) -> None:
        """Write this rank's status to the store, for another rank's diagnosis."""
        self.store.set(str(self.rank), json.dumps(attrs.asdict(self._build_own_status())))

    def _build_own_status(self) -> RankStatus:
        """Return this rank's location and its threads' blocking collectives."""
        blocked = dict(self._blocked)
        main = blocked.pop(self._main, "waits for the others after an error" if self.is_recovering else "")
        return RankStatus(self.location, main, next(iter(blocked.values()), ""))

    def _keep_and_write_first_failure(self, failure: Failure) -> None:
        """Keep the first failure, start the grace period, and write the error file."""
        if self.failure is None:
            self.failure, self._deadline = failure, time.monotonic() + GRACE
            write_torchrun_error_file(self.error_file, failure.text, is_cause=failure.reporter == self.rank)

    def _find_dead_local_ranks(self) -> list[int]:
        """Return this machine's ranks whose processes ended without announcing it."""
        return [rank for rank in self._processes.find_ended() if not self.store.check([f"exiting/{rank}"])]

    def _beat_and_find_silent(self) -> list[int]:
        """Send a heartbeat, and return the watched ranks without one for too long, unless they have ended normally."""
        now = time.monotonic()
        # at most two beats count, so that nobody is blamed after this process or its machine was suspended
        passed = min(now - self._beaten, 2 * BEAT)
        if passed < BEAT:
            return []
        self._beaten = now
        self.store.add(f"beat/{self.rank}", 1)
        others = [(self.rank + offset) % self.size for offset in range(1, self.size)]
        for rank in [rank for rank in others if rank not in self.losses][:MAX_WATCHED]:
            count, (before, silence) = self.store.add(f"beat/{rank}", 0), self._heard.get(rank, (-1, 0.0))
            self._heard[rank] = count, silence + passed if count == before else 0.0
        silent = [rank for rank, (_, silence) in self._heard.items() if silence > self.heartbeat_timeout]
        return [rank for rank in silent if rank not in self.losses and not self.store.check([f"exiting/{rank}"])]

    def _describe_lost_rank(self, rank: int, reason: str) -> str:
        """Return a message about a rank, with its process if it is on this machine."""
        process = f" (process {self.peers[rank]}{self.where})" if rank in self.peers else ""
        return f"rank {rank}{process} {reason}"

    def _kill_lost_processes(self) -> None:
        """Kill lost processes on this machine, such as stopped ones, or end this process if it is lost itself."""
        self._processes.kill(self.losses)
        if self.rank in self.losses:
            self.exit(1)

    def _wait_until_failure_is_known(self, seconds: float) -> None:
        """Wait until a failure is known, at most `seconds`."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)

    def _format_error(self, error: Exception) -> str:
        """Return `rank, location: error`, without the rank if all ranks raised the error together."""
        rank = "" if isinstance(error, RankError) else f"rank {self.rank}"
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        prefix = ", ".join(filter(None, [rank, self.location]))
        return f"{prefix}: {text}" if prefix else text
