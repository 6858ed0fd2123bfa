"""Python's actions, by its audit hooks: opened files, executed code, started processes."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

CODE = (
    *("exec", "compile", "pickle.find_class", "marshal.loads", "code.__new__", "function.__new__"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("ctypes.dlopen", "ctypes.dlsym", "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request"),
)
"""Events of code that comes from somewhere, of processes, and of the network."""


@attrs.define
class Audit:
    """A recorder of events from `start` to `stop`. A hook can't be removed: use it in a separate process."""

    inside: list[str]
    found: list[str] = attrs.field(factory=list)
    on: bool = False

    def install(self) -> None:
        """Record from now on."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Sequence[Any]) -> None:
        if not self.on:
            return
        if event in CODE and not _is_generated(event):
            self.found.append(f"{event} {arguments[:1]!r:.200}")
        elif event == "import":
            self.found.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = _real(os.fsdecode(arguments[0]), follow=not (arguments[2] or 0) & os.O_NOFOLLOW)
            if not (path + os.sep).startswith(tuple(self.inside)):
                self.found.append(f"open {path}")


def _is_generated(event: str) -> bool:
    """Whether an event is code generated for drawloom's classes by attrs and cattrs."""
    frame = sys._getframe(2)
    return event in ("compile", "exec") and str(frame.f_globals.get("__name__")).split(".")[0] in ("attr", "cattrs")


def _real(path: str, *, follow: bool) -> str:
    """Return the opened file; follow a link at the end only if the caller did."""
    if follow:
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def places(*folders: Path) -> list[str]:
    """Return folders by their real paths, each with a trailing slash."""
    return [os.path.realpath(folder) + os.sep for folder in folders]
