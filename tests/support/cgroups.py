"""Limits of control groups (version 1) for processes of a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def is_possible(controller: str) -> bool:
    """Whether this process may make a group below a controller, `memory` or `pids`, and set its limits."""
    return (ROOT / controller / "cgroup.procs").exists() and os.access(ROOT / controller, os.W_OK)


@contextmanager
def group(controller: str, **limits: int) -> Iterator[Path]:
    """
    Yield a new group with limits, named as its files are but with `_` for `.`; its processes have ended when it closes.
    """
    path = ROOT / controller / f"drawloom-test-{os.getpid()}"
    path.mkdir()
    try:
        for name, value in limits.items():
            (path / f"{controller}.{name}").write_text(str(value))
        yield path
    finally:
        path.rmdir()


def enter(path: Path) -> None:
    """Move this process into a group."""
    (path / "cgroup.procs").write_text(str(os.getpid()))
