"""
Power cuts: an ext4 file system in a file in memory, of which a copy is made at some moment.

Data that was not on the disk by then is not in the copy. It needs root and loop devices.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

SIZE = 24  # MiB: two checkpoints and a journal
MEMORY = Path("/dev/shm")


def is_possible() -> bool:
    """Whether this process may mount a file system here."""
    tools = all(shutil.which(tool) for tool in ("mkfs.ext4", "mount", "umount"))
    if os.geteuid() != 0 or not tools or not MEMORY.is_dir():
        return False
    with contextlib.suppress(subprocess.CalledProcessError, OSError), _image() as image, mounted(image):
        return True
    return False


@attrs.frozen
class Cut:
    """The step that was committed for certain at the power cut, and the step found afterwards."""

    committed: int
    found: int


def cut(work: Callable[[Path, Callable[[int], None]], None], after: float, find: Callable[[Path], int]) -> Cut:
    """
    Run `work` on a new file system, in a fork of this process that reports its committed steps; cut the power `after`
    seconds after its first report, and call `find` on what is left.
    """
    with _image() as image, mounted(image) as place:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                work(place, lambda step: _say(theirs, step))
            os._exit(0)
        os.close(theirs)
        said = os.read(ours, 1)
        time.sleep(after)
        os.kill(child, signal.SIGSTOP)
        copy = image.with_suffix(".copy")
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(ours, 1):
                said = more
        shutil.copyfile(image, copy)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
    try:
        with mounted(copy) as place:
            return Cut(said[0], find(place))
    finally:
        copy.unlink()


@contextlib.contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """Mounts the file system of an image."""
    place = image.with_suffix(".mount")
    place.mkdir()
    try:
        subprocess.run(["mount", "-o", "loop,nodiscard", str(image), str(place)], check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True, capture_output=True)
    finally:
        place.rmdir()


@contextlib.contextmanager
def _image() -> Iterator[Path]:
    image = MEMORY / f"power-{os.getpid()}-{time.monotonic_ns()}"
    with open(image, "wb") as file:
        file.truncate(SIZE * 2**20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        yield image
    finally:
        image.unlink()


def _say(pipe: int, step: int) -> None:
    os.write(pipe, bytes([step]))
