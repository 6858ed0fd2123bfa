"""
Connections of this process's groups, which a call from another thread can break.

A gloo collective waits for its peers without a way to cancel it, and only ranks connected to a killed process notice
the death. Shutting down this process's own ends makes every waiting collective raise within milliseconds, and the peers
see a broken connection in turn. Listening sockets must stay open: gloo ends the process otherwise.

An NCCL communicator is aborted: its kernels end, with wrong results, and later operations raise an error.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs

DESCRIPTORS = "/proc/self/fd"  # only Linux has it; elsewhere no connection is recorded
ABORT_SECONDS = 2.0  # for an abort, before connections are shut down
INODE = re.compile(r"socket:\[(\d+)\]")


@attrs.define(eq=False)
class Connections:
    """
    Recorder for sockets opened by gloo and NCCL, and by this process's own clients of the launch's store at `port`.

    The store's own ends are left alone: the store may be in this process. `aborts` are functions that abort NCCL
    communicators, in the order of their creation.
    """

    port: int = 0
    is_broken: bool = False
    aborts: list[Callable[[], object]] = attrs.field(factory=list)
    _inodes: set[int] = attrs.field(init=False, factory=set)
    _before: set[int] | None = attrs.field(init=False, default=None)  # sockets before a recording in progress

    @contextmanager
    def record_sockets(self) -> Iterator[None]:
        """
        Record the sockets opened in the body. Another thread's new sockets are recorded, too.

        Raises RuntimeError if the connections are broken: the body would wait for lost ranks.
        """
        if self.is_broken:
            raise RuntimeError("a rank is lost, and no new group can be made with it")
        self._before = {*_list_sockets_by_inode()}
        try:
            yield
        finally:
            self._inodes, self._before = self._find_recorded(), None

    def shut_down_all(self) -> int:
        """
        Abort all communicators, and shut down every open recorded connection, also of a recording in progress.

        Return the number of shut connections.
        """
        self.is_broken = True
        if self.aborts:
            # in a thread, because an abort may wait for the device
            aborting = threading.Thread(target=self._abort_all, name="abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_SECONDS)
        count, recorded = 0, self._find_recorded()
        for inode, descriptor in _list_sockets_by_inode().items():
            if inode in recorded:
                with suppress(OSError):  # closed meanwhile, or without a peer, like a listening socket
                    count += self._shut_down_socket(descriptor)
        return count

    def _abort_all(self) -> None:
        """Abort all communicators, the newest first, because later ones may share the resources of earlier ones."""
        while self.aborts:
            with suppress(RuntimeError):
                self.aborts.pop()()

    def _find_recorded(self) -> set[int]:
        """Return the recorded sockets, with those of a recording in progress."""
        before = self._before
        return self._inodes if before is None else self._inodes | (_list_sockets_by_inode().keys() - before)

    def _shut_down_socket(self, descriptor: int) -> bool:
        """Shut down a TCP connection, unless it is the store's end; return whether this was done."""
        with socket.socket(fileno=os.dup(descriptor)) as connection:
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
