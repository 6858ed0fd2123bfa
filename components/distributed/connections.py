"""
Connections of this process's gloo groups, which a call from another thread can break.

A gloo collective waits for its peers without a way to cancel it, and only ranks connected to a killed process notice
the death. Shutting down this process's own ends makes every waiting collective raise within milliseconds, and the peers
see a broken connection in turn. Listening sockets must stay open: gloo ends the process otherwise.

While a group is made, a rank may wait for a lost one to connect, without any socket that could be shut down. So groups
are made in a thread, which is abandoned.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import torch.distributed as dist

DESCRIPTORS = "/proc/self/fd"  # only Linux has it; elsewhere no connection is recorded
LOST = "a rank is lost, and no new group can be made with it"
INODE = re.compile(r"socket:\[(\d+)\]")


@attrs.define(eq=False)
class Connections:
    """
    Recorder for sockets opened by gloo, and by this process's own clients of the launch's store at `port`.

    The store's own ends are left alone: the store may be in this process.
    """

    port: int = 0
    is_broken: bool = False
    _inodes: set[int] = attrs.field(init=False, factory=set)
    _before: set[int] | None = attrs.field(init=False, default=None)  # sockets before a recording in progress
    _is_settled: threading.Event = attrs.field(init=False, factory=threading.Event)  # broken, or a group is made

    @contextmanager
    def record_sockets(self) -> Iterator[None]:
        """
        Record the sockets opened in the body. Another thread's new sockets are recorded, too.

        Raises RuntimeError if the connections are broken: the body would wait for lost ranks.
        """
        if self.is_broken:
            raise RuntimeError(LOST)
        self._before = {*_list_sockets_by_inode()}
        try:
            yield
        finally:
            self._inodes, self._before = self._find_recorded_inodes(), None

    @contextmanager
    def make_gloo_connecting_interruptible(self) -> Iterator[None]:
        """In the body, `break_all_connections` ends a new gloo group's wait for its ranks, with a RuntimeError."""
        module: Any = dist.distributed_c10d
        original: Any = module.ProcessGroupGloo

        class Breakable(type):
            def __call__(cls, *arguments: Any, **options: Any) -> Any:
                return self.connect_in_thread_until_broken(lambda: original(*arguments, **options))

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, original)

        module.ProcessGroupGloo = Breakable("ProcessGroupGloo", (), {})  # torch has no argument for the class
        try:
            yield
        finally:
            module.ProcessGroupGloo = original

    def connect_in_thread_until_broken(self, connect: Callable[[], Any]) -> Any:
        """
        Return the result of a function that connects ranks; it runs in another thread.

        Raises RuntimeError as soon as the connections are broken; the abandoned thread ends after gloo's timeout.
        """
        outcome: list[Any] = []
        self._is_settled.clear()

        def connect_and_store_outcome() -> None:
            try:
                outcome.append((connect(), None))
            except Exception as error:
                outcome.append((None, error))
            self._is_settled.set()

        threading.Thread(target=connect_and_store_outcome, name="gloo-connect", daemon=True).start()
        while not (self.is_broken or outcome):
            self._is_settled.wait()
        if not outcome:
            raise RuntimeError(LOST)
        [(result, error)] = outcome
        if error is not None:
            raise error
        return result

    def break_all_connections(self) -> int:
        """
        Shut down every open recorded connection, also of a recording in progress, and return their number.
        """
        self.is_broken = True
        self._is_settled.set()
        count, recorded = 0, self._find_recorded_inodes()
        for inode, descriptor in _list_sockets_by_inode().items():
            if inode in recorded:
                with suppress(OSError):  # closed meanwhile, or without a peer, like a listening socket
                    count += self._shut_down_socket(inode, descriptor)
        return count

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


def _list_sockets_by_inode() -> dict[int, int]:
    """Return this process's sockets: descriptors by inode, which no later socket gets while this one is open."""
    descriptors: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir(DESCRIPTORS):
            with suppress(OSError):
                if match := INODE.fullmatch(os.readlink(f"{DESCRIPTORS}/{name}")):
                    descriptors[int(match[1])] = int(name)
    return descriptors
