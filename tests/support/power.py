"""
Power cuts: an ext4 file system in a file in memory, copied at some moment.

Data not on the disk by then is not in the copy. It needs root and loop devices.
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
    with contextlib.suppress(subprocess.CalledProcessError, OSError), _image() as image, mount_image(image):
        return True
    return False


@attrs.frozen
class Cut:
    """The step certainly committed at the power cut, and the step read afterwards."""

    committed: int
    found: int


def cut(work: Callable[[Path, Callable[[int], None]], None], after: float, find: Callable[[Path], int]) -> Cut:
    """
    Run `work` on a new file system, in a fork of this process, which reports its committed steps; cut the power `after`
    seconds after its first report, and call `find` on the resulting folder.
    """
    with _image() as image, mount_image(image) as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                work(folder, lambda step: _say(writer, step))
            os._exit(0)
        os.close(writer)
        reported = os.read(reader, 1)
        time.sleep(after)
        os.kill(child, signal.SIGSTOP)
        copy = image.with_suffix(".copy")
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(reader, 1):
                reported = more
        shutil.copyfile(image, copy)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    try:
        with mount_image(copy) as folder:
            return Cut(reported[0], find(folder))
    finally:
        copy.unlink()


@contextlib.contextmanager
def mount_image(image: Path) -> Iterator[Path]:
    """Mount an image's file system."""
    mount_point = image.with_suffix(".mount")
    mount_point.mkdir()
    try:
        subprocess.run(["mount", "-o", "loop,nodiscard", str(image), str(mount_point)], check=True, capture_output=True)
        try:
            yield mount_point
        finally:
            subprocess.run(["umount", str(mount_point)], check=True, capture_output=True)
    finally:
        mount_point.rmdir()


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
