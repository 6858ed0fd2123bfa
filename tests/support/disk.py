"""System calls that change the file system, watched in this process: to kill it, to fail, or to model power cuts."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

CALLS = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")


@attrs.frozen
class Call:
    """A call about to be made: its name, the absolute path, and its arguments."""

    name: str
    path: str
    arguments: tuple[Any, ...]


Seen = Callable[[Call], None]


@contextmanager
def watch_calls(before: Seen, after: Seen | None = None) -> Iterator[None]:
    """Call `before` and `after` around each file-changing system call, in any thread."""
    originals = {name: getattr(os, name) for name in CALLS}
    lock = threading.RLock()
    busy = [False]  # with a call that was seen: what is done about it is not watched itself

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with lock:  # one after another, so that their order is that in which they are seen
                if busy[0] or (name == "open" and not arguments[1] & os.O_CREAT):
                    return originals[name](*arguments, **named)
                call_made = Call(name, _path(arguments[0], named.get("dir_fd")), arguments)
                busy[0] = True
                try:
                    before(call_made)
                    result = originals[name](*arguments, **named)
                    if after is not None:
                        after(call_made)
                finally:
                    busy[0] = False
                return result

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield
    finally:
        for name, call in originals.items():
            setattr(os, name, call)


def kill_at(number: int, *, half: bool = False) -> Seen:
    """Return a watcher, which kills this process at its n-th call; with `half`, after half of a write."""
    count = 0

    def seen(call: Call) -> None:
        nonlocal count
        count += 1
        if count == number:
            if half and call.name == "pwrite":
                file, data, offset = call.arguments
                os.pwrite(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    return seen


@attrs.define
class FailAt:
    """A watcher that makes the n-th call fail once with this errno; `hit` is the failed call."""

    number: int
    code: int
    count: int = 0
    hit: Call | None = None

    def __call__(self, call: Call) -> None:
        self.count += 1
        if self.count == self.number:
            self.hit = call
            path = [] if isinstance(call.arguments[0], int) else [str(call.arguments[0])]
            raise OSError(self.code, os.strerror(self.code), *path)


def _path(first: Any, folder: int | None) -> str:
    if isinstance(first, int):
        return os.readlink(f"/proc/self/fd/{first}")
    within = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
    return os.path.join(within, os.fspath(first))


@attrs.define(eq=False)
class File:
    """A file's content for programs, and its content on disk."""

    seen: bytes = b""
    lasting: bytes = b""


@attrs.define(eq=False)
class Folder:
    """A folder's entries for programs, and all its states since the last one certainly on disk."""

    seen: dict[str, "File | Folder"] = attrs.field(factory=dict)
    lasting: list[dict[str, "File | Folder"]] = attrs.field(factory=lambda: [{}])

    def change(self, change: Callable[[dict[str, "File | Folder"]], object]) -> None:
        """Add a state, which may or may not reach the disk."""
        change(self.seen)
        self.lasting.append(dict(self.seen))

    def sync(self) -> None:
        """Drop older states: the newest one is on disk."""
        self.lasting = [dict(self.seen)]


class Shadow:
    """
    A model of a folder after a power cut.

    Data written to a file and not fsynced since is lost. Any number of changes to a folder since its last fsync may
    have reached the disk, in the order in which they were made.
    """

    def __init__(self, root: Path) -> None:
        self._place = root
        self.root = _as_lasting(root)

    def done(self, call: Call) -> None:
        """Record a completed call."""
        where = os.path.relpath(call.path, self._place)
        if where.startswith(".."):
            return
        folder, name = self._folder(os.path.dirname(where)), os.path.basename(where)
        match call.name:
            case "open":
                folder.change(lambda entries: entries.update({name: File()}))
            case "mkdir":
                folder.change(lambda entries: entries.update({name: Folder()}))
            case "unlink" | "rmdir":
                folder.change(lambda entries: entries.pop(name))
            case "rename":
                to = os.path.relpath(call.arguments[1], self._place)
                if os.path.dirname(to) != os.path.dirname(where):
                    raise NotImplementedError("a rename into another folder")
                folder.change(lambda entries: entries.update({os.path.basename(to): entries.pop(name)}))
            case "write" | "pwrite":
                file = folder.seen[name]
                if isinstance(file, File):
                    file.seen = Path(call.path).read_bytes()
            case "fsync":
                self._sync(self._folder(where) if where == "." else folder.seen[name])

    def cuts(self) -> int:
        """Return the number of different folders a power cut could leave now, as far as they are tried."""
        return max(len(folder.lasting) for folder in _folders(self.root))

    def leave(self, where: Path, number: int) -> None:
        """Write the folder left by a power cut: each folder in the state with this number, or its newest."""
        _leave(self.root, where, number)

    def _folder(self, path: str) -> Folder:
        folder = self.root
        for name in path.split(os.sep) if path not in ("", ".") else []:
            part = folder.seen[name]
            if not isinstance(part, Folder):
                raise NotADirectoryError(path)
            folder = part
        return folder

    def _sync(self, entry: File | Folder) -> None:
        if isinstance(entry, Folder):
            entry.sync()
        else:
            entry.lasting = entry.seen


def _as_lasting(root: Path) -> Folder:
    folder = Folder()
    for path in root.iterdir():
        folder.seen[path.name] = _as_lasting(path) if path.is_dir() else File(*[path.read_bytes()] * 2)
    folder.sync()
    return folder


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for state in folder.lasting:
        for part in state.values():
            if isinstance(part, Folder):
                yield from _folders(part)


def _leave(folder: Folder, where: Path, number: int) -> None:
    where.mkdir()
    for name, part in folder.lasting[min(number, len(folder.lasting) - 1)].items():
        if isinstance(part, Folder):
            _leave(part, where / name, number)
        else:
            (where / name).write_bytes(part.lasting)
