"""What the disk can do to a checkpoint."""

import errno
import os
from pathlib import Path

import pytest

from drawloom.components.checkpoint.io_errors import SaveIOError, run_io_on_all, run_io_on_rank0, size
from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.storage import durable_files


def _fail(code: int) -> None:
    raise OSError(code, os.strerror(code), "/runs/x/file")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_path_need_and_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """In one line, whichever way the system puts it."""
    monkeypatch.setattr(durable_files, "free", lambda _: 400_000_000)
    with pytest.raises(SaveIOError) as caught:
        run_io_on_all(SingleProcess(), lambda: _fail(code))
    expected = f"disk full: needs 3.1 GB, 400.0 MB free in {tmp_path} (/runs/x/file: {os.strerror(code)})"
    assert caught.value.told(tmp_path, 3_100_000_000) == expected


def test_other_trouble_is_told_as_the_system_puts_it(tmp_path: Path) -> None:
    """With the path."""
    with pytest.raises(SaveIOError) as caught:
        run_io_on_rank0(SingleProcess(), lambda: _fail(errno.EIO))
    assert caught.value.told(tmp_path, 1) == "/runs/x/file: Input/output error"


def test_a_disk_that_is_gone_has_no_free_space_to_tell(tmp_path: Path) -> None:
    """That is no reason to fail a second time."""
    trouble = SaveIOError("", "No space left on device", full=True)
    assert "nobody knows how much free in" in trouble.told(tmp_path / "gone", 7)


def test_other_errors_stay_what_they_are() -> None:
    """Only the system's are trouble that a run can live with."""
    with pytest.raises(ZeroDivisionError):
        run_io_on_all(SingleProcess(), lambda: 1 // 0)
    assert run_io_on_all(SingleProcess(), lambda: 5) == [5]


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (3_140_000_000, "3.1 GB"), (5 * 10**16, "50000.0 TB")],
)
def test_sizes_are_written_for_people(count: int, words: str) -> None:
    """In powers of a thousand, as disks are sold."""
    assert size(count) == words
