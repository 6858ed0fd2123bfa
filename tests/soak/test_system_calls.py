"""A save with retention, disturbed at every system call by strace, where it is installed."""

import errno
import os
import shutil
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from drawloom.graph import UserError
from support.checkpoints import save_steps
from support.crashes import Remains, remains, save_two
from support.processes import run_ranks
from support.tracing import CHANGING, STRACE, run_disturbed


def _note(path: Path, step: int) -> None:
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, bytes([step]), 0)
    os.close(file)


def _everywhere(base: Path, staging: bool, what: str) -> list[tuple[int, Remains]]:
    """For each call of each name in turn: the exit code, and what is left."""
    os.chdir(base)
    save_steps(base / "good", 1, 2, keep=2)
    found: list[tuple[int, Remains]] = []
    for call in CHANGING:
        for number in count(1):
            folder, note = base / "run", base / "committed"
            shutil.copytree(base / "good", folder)
            note.write_bytes(b"\x02")
            code, came_so_far = run_disturbed(partial(_save, folder, note, staging), call, number, what)
            found.append((code, remains(folder, note.read_bytes()[0])))
            shutil.rmtree(folder)
            if not came_so_far:
                break
    return found


def _save(folder: Path, note: Path, staging: bool) -> None:
    """Save; a full disk raises its own error and no other."""
    try:
        save_two(folder, staging, lambda step: _note(note, step))
    except (UserError, OSError) as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise


if STRACE is not None:

    @pytest.mark.parametrize("staging", [pytest.param(False, marks=pytest.mark.soak), True])
    def test_a_kill_at_every_system_call_loses_no_committed_step(tmp_path: Path, staging: bool) -> None:
        """This includes all calls of Python and torch."""
        [found] = run_ranks(_everywhere, 1, tmp_path, staging, "signal=SIGKILL", timeout=400)
        steps = [each.restored for _, each in found]
        assert len(found) > 50
        assert not [each for _, each in found if each.restored < each.committed or each.torn]
        assert {2, 3} <= {*steps} <= {2, 3, 4}

    @pytest.mark.parametrize("staging", [pytest.param(False, marks=pytest.mark.soak), True])
    def test_a_full_disk_at_every_system_call_is_an_error(tmp_path: Path, staging: bool) -> None:
        """It is never treated as success or as another error; committed steps are restored."""
        [found] = run_ranks(_everywhere, 1, tmp_path, staging, "error=ENOSPC", timeout=400)
        assert {code for code, _ in found} == {0}
        assert not [each for _, each in found if each.restored < each.committed or each.torn]
