"""Saves with retention, disturbed at every system call by strace, if it is installed."""

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


def _record_commit(path: Path, step: int) -> None:
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, bytes([step]), 0)
    os.close(file)


def _disturb_everywhere(base: Path, staging: bool, disturbance: str) -> list[tuple[int, Remains]]:
    """Disturb every system call in turn, and return exit codes and remains."""
    os.chdir(base)
    save_steps(base / "good", 1, 2, keep=2)
    outcomes: list[tuple[int, Remains]] = []
    for call in CHANGING:
        for number in count(1):
            folder, note = base / "run", base / "committed"
            shutil.copytree(base / "good", folder)
            note.write_bytes(b"\x02")
            code, came_so_far = run_disturbed(partial(_save, folder, note, staging), call, number, disturbance)
            outcomes.append((code, remains(folder, note.read_bytes()[0])))
            shutil.rmtree(folder)
            if not came_so_far:
                break
    return outcomes


def _save(folder: Path, note: Path, staging: bool) -> None:
    """Save, and ignore only the error of a full disk."""
    try:
        save_two(folder, staging, lambda step: _record_commit(note, step))
    except (UserError, OSError) as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise


if STRACE is not None:

    @pytest.mark.soak
    @pytest.mark.parametrize("staging", [False, True])
    def test_kill_at_every_system_call_loses_no_committed_step(tmp_path: Path, staging: bool) -> None:
        """A kill at any system call, also of Python and torch, loses no committed step and leaves no torn one."""
        [outcomes] = run_ranks(_disturb_everywhere, 1, tmp_path, staging, "signal=SIGKILL", timeout=400)
        steps = [left.restored for _, left in outcomes]
        assert len(outcomes) > 50
        assert not [left for _, left in outcomes if left.restored < left.committed or left.torn]
        assert {2, 3} <= {*steps} <= {2, 3, 4}

    @pytest.mark.soak
    @pytest.mark.parametrize("staging", [False, True])
    def test_full_disk_at_every_system_call_is_an_error(tmp_path: Path, staging: bool) -> None:
        """A full disk is never treated as success or as another error, and committed steps are restored."""
        [outcomes] = run_ranks(_disturb_everywhere, 1, tmp_path, staging, "error=ENOSPC", timeout=400)
        assert {code for code, _ in outcomes} == {0}
        assert not [left for _, left in outcomes if left.restored < left.committed or left.torn]
