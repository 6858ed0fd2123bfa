"""
Connections of this process's groups, which a call from another thread can break.

A gloo collective waits for its peers without a way to cancel it, and only ranks connected to a killed process notice
the death. Shutting down this process's own ends makes every waiting collective raise within milliseconds, and the peers
see a broken connection in turn. Listening sockets must stay open: gloo ends the process otherwise.

While a group is made, a rank may wait for a lost one to connect, without any socket that could be shut down. And if a
connection breaks while a message is partly written or read, gloo does not wake the operation waiting for the message
(torch 2.13; `Pair::signalException` in gloo/transport/tcp/pair.cc). So helper threads make groups and wait for
operations, and are abandoned after a loss.

NCCL's communicators are aborted, which ends kernels waiting for lost ranks; their results are wrong.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import attrs
import torch
import torch.distributed as dist

from drawloom import internal

DESCRIPTORS = "/proc/self/fd"  # only Linux has it; elsewhere no connection is recorded
LOST = "a rank is lost, and no new group can be made with it"
STUCK = "a rank is lost, and this operation did not notice it"
STUCK_AFTER = 1.0  # seconds after a loss, in which gloo ends other waits itself
WORK: Any = dist.distributed_c10d.Work
INODE = re.compile(r"socket:\[(\d+)\]")


@attrs.define(eq=False)
class HelperCall:
    """A function's call in a helper thread; `settled` is set at its end. Its result or error is kept for the caller."""

    function: Callable[[], Any]
    settled: threading.Event
    _helper: "SimpleQueue[HelperCall | None]"
    _outcome: tuple[Any, BaseException | None] | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the function has returned or raised."""
        return self._outcome is not None

    def run(self) -> None:
        """Call the function, and keep its outcome."""
        try:
            self._outcome = self.function(), None
        except BaseException as error:
            self._outcome = None, error
        self.settled.set()

    def get_result(self) -> Any:
        """Return the function's result, or raise its error."""
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return result


@attrs.define(eq=False)
class HelperThreads:
    """Helper threads, started as needed; an idle one is used again."""

    _idle: list["SimpleQueue[HelperCall | None]"] = internal(factory=list)

    def start(self, function: Callable[[], Any], settled: threading.Event) -> HelperCall:
        """Start to call a function in a helper thread, which sets `settled` at the end."""
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = SimpleQueue()
            threading.Thread(target=_serve_calls, args=(helper,), name="helper", daemon=True).start()
        call = HelperCall(function, settled, helper)
        helper.put(call)
        return call

    def finish_or_abandon(self, call: HelperCall) -> bool:
        """Return whether a call is done; its thread is idle then, and otherwise ends after the call."""
        if not call.is_done:
            call._helper.put(None)
            return False
        self._idle.append(call._helper)
        return True

    def end(self) -> None:
        """End all idle threads."""
        while self._idle:
            self._idle.pop().put(None)


def _serve_calls(calls: "SimpleQueue[HelperCall | None]") -> None:
    """Run calls from a queue until it yields None."""
    while (call := calls.get()) is not None:
        call.run()
        del call


@attrs.define(eq=False)
class Connections:
    """
    Recorder for sockets opened by gloo, and by this process's own clients of the launch's store at `port`.

    The store's own ends are left alone: the store may be in this process. `abort_communicators` is called once, in a
    thread, because NCCL may take a moment.
    """

    port: int = 0
    is_broken: bool = False
    abort_communicators: Callable[[], object] | None = None
    has_stuck_operations: bool = internal(False)
    _helpers: HelperThreads = internal(factory=HelperThreads)
    _inodes: set[int] = internal(factory=set)
    _abort: threading.Thread | None = internal(None)
    _before: set[int] | None = internal(None)  # sockets before a recording in progress
    _waiting: set[threading.Event] = internal(factory=set)  # of the callers of helper threads

    @contextmanager
    def record_sockets(self, *, keep: bool = True) -> Iterator[None]:
        """
        Record the sockets opened in the body, also another thread's; without `keep`, forget them at its end.

        Raises RuntimeError if the connections are broken: the body would wait for lost ranks.
        """
        if self.is_broken:
            raise RuntimeError(LOST)
        self._before = {*_list_sockets_by_inode()}
        try:
            yield
        finally:
            self._inodes, self._before = self._find_recorded_inodes() if keep else self._inodes, None

    @contextmanager
    def make_gloo_connecting_interruptible(self) -> Iterator[None]:
        """In the body, `break_all_connections` ends a new gloo group's wait for its ranks, with a RuntimeError."""
        original: Any = dist.distributed_c10d.ProcessGroupGloo

        def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            return self.call_until_broken(lambda: original(store, rank, size, timeout))

        with _replace_gloo_groups(create):
            yield

    @contextmanager
    def make_waits_interruptible(self) -> Iterator[None]:
        """
        In the body, `break_all_connections` ends every wait for an operation of torch.distributed, with a RuntimeError.

        The errors of most operations come from gloo; the others are stuck until their timeout, in a helper thread.
        """
        original = WORK.wait

        def wait(work: Any, *arguments: Any) -> Any:
            if arguments or work.is_completed():
                return original(work, *arguments)
            return self.call_until_broken(lambda: original(work), STUCK_AFTER)

        WORK.wait = wait  # DTensors have no argument for it
        try:
            yield
        finally:
            WORK.wait = original

    def call_until_broken(self, function: Callable[[], Any], seconds: float = 0.0) -> Any:
        """
        Call a function in a helper thread with this thread's inference mode, and return its result.

        The function may wait for ranks. Raises RuntimeError if it waits for `seconds` after the connections broke.
        """
        settled = threading.Event()
        self._waiting.add(settled)
        # gloo's waits copy some results, and only a thread in inference mode may write to its tensors
        call = self._helpers.start(torch.inference_mode(torch.is_inference_mode_enabled())(function), settled)
        while not (self.is_broken or call.is_done):
            settled.wait()
        end = time.monotonic() + seconds
        while not call.is_done and (left := end - time.monotonic()) > 0:
            settled.clear()
            settled.wait(left * (not call.is_done))
        self._waiting.discard(settled)
        if not self._helpers.finish_or_abandon(call):
            self.has_stuck_operations |= seconds > 0
            raise dist.DistNetworkError(STUCK if seconds else LOST)
        return call.get_result()

    def break_all_connections(self) -> int:
        """
        Shut down every open recorded connection, also of a recording in progress, and return their number.
        """
        self.is_broken = True
        abort, self.abort_communicators = self.abort_communicators, None
        if abort is not None:
            self._abort = threading.Thread(target=abort, name="abort", daemon=True)
            self._abort.start()
        for settled in [*self._waiting]:
            settled.set()
        count, recorded = 0, self._find_recorded_inodes()
        for inode, descriptor in _list_sockets_by_inode().items():
            if inode in recorded:
                with suppress(OSError):  # closed meanwhile, or without a peer, like a listening socket
                    count += self._shut_down_socket(inode, descriptor)
        return count

    def wait_until_aborted(self, seconds: float) -> bool:
        """Wait up to `seconds` for the abort, if there is one; return whether it has ended."""
        if self._abort is not None:
            self._abort.join(seconds)
        return self._abort is None or not self._abort.is_alive()

    def end_helper_threads(self) -> None:
        """End idle helper threads."""
        self._helpers.end()

    def _find_recorded_inodes(self) -> set[int]:
        """Return the recorded sockets, also from a recording in progress."""
        before = self._before
        return self._inodes if before is None else self._inodes | (_list_sockets_by_inode().keys() - before)

    def _shut_down_socket(self, inode: int, descriptor: int) -> bool:
        """Shut down a TCP connection, unless it is the store's end; return whether this was done."""
        duplicate = os.dup(descriptor)
        # gloo may have closed the socket meanwhile, and another thread may have got its descriptor for a new file
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            return False
        with socket.socket(fileno=duplicate) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()  # raises for a listening socket
            if self.port == connection.getsockname()[1]:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        return True


@contextmanager
def run_gloo_collectives_in_one_thread() -> Iterator[None]:
    """
    In the body, new gloo groups have one thread for their collectives, which run in order.

    torch gives a group two threads for gloo's context, and once a buffer was freed twice (torch 2.13).
    """
    original: Any = dist.distributed_c10d.ProcessGroupGloo

    def create(store: Any, rank: int, size: int, timeout: timedelta, **named: Any) -> Any:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "") if size > 1 else ""
        devices = [original.create_device(interface=name) for name in names.split(",") if name]
        options = original._Options()  # torch has no public argument
        options._devices, options._timeout = devices or [original.create_default_device()], timeout
        options._threads = 1
        for name, value in named.items():  # torch 2.14 has one: enable_reconfigure
            setattr(options, name, value)
        return original(store, rank, size, options)

    with _replace_gloo_groups(create):
        yield


@contextmanager
def _replace_gloo_groups(create: Callable[..., Any]) -> Iterator[None]:
    """In the body, torch makes gloo groups by `create`; it has no argument for the class."""
    module: Any = dist.distributed_c10d
    original: Any = module.ProcessGroupGloo

    class Replacement(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> Any:
            return create(store, rank, size, timeout)  # torch 2.15 has an option to change a group's ranks, too

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    module.ProcessGroupGloo = Replacement("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


def _list_sockets_by_inode() -> dict[int, int]:
    """Return this process's sockets: descriptors by inode, which no later socket gets while this one is open."""
    descriptors: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir(DESCRIPTORS):
            with suppress(OSError):
                if match := INODE.fullmatch(os.readlink(f"{DESCRIPTORS}/{name}")):
                    descriptors[int(match[1])] = int(name)
    return descriptors
