"""
Connections of this process's gloo groups, which a call from another thread can break.

A gloo collective waits for its peers without a way to cancel it, and only ranks connected to a killed process notice
the death. Shutting down this process's own ends makes every waiting collective raise within milliseconds, and the peers
see a broken connection in turn. Listening sockets must stay open: gloo ends the process otherwise.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import attrs

DESCRIPTORS = "/proc/self/fd"  # only Linux has it; elsewhere no connection is recorded
INODE = re.compile(r"socket:\[(\d+)\]")


@attrs.define(eq=False)
class Connections:
    """Recorder for sockets opened by gloo. Sockets to or from `port`, the launch's store, are left alone."""

    port: int = 0
    _inodes: set[int] = attrs.field(init=False, factory=set)

    @contextmanager
    def record_sockets(self) -> Iterator[None]:
        """Record the sockets opened in the body. Another thread's new sockets are recorded, too."""
        before = _list_sockets_by_inode().keys()
        try:
            yield
        finally:
            self._inodes |= _list_sockets_by_inode().keys() - before

    def shut_down_all(self) -> int:
        """Shut down every open recorded connection, and return their number."""
        count = 0
        for inode, descriptor in _list_sockets_by_inode().items():
            if inode in self._inodes:
                with suppress(OSError):  # closed meanwhile, or without a peer, like a listening socket
                    count += self._shut_down_socket(descriptor)
        return count

    def _shut_down_socket(self, descriptor: int) -> bool:
        """Shut down a TCP connection other than the store's; return whether this was done."""
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if self.port in (connection.getpeername()[1], connection.getsockname()[1]):
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
