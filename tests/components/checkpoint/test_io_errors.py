"""The disk under the checkpoints: its room, and its errors."""

import errno
import os
from pathlib import Path

import pytest
import torch

from drawloom.components.checkpoint.io_errors import described, size
from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.distributed.rank_errors import Agreed, run_on_rank0
from drawloom.components.storage import durable_files
from drawloom.graph import UserError
from support.checkpoints import Memory, SpreadMemory, checkpointer, save_steps


def _failed(code: int) -> Agreed:
    """The error of a rank on which a system call failed."""

    def fail() -> None:
        raise OSError(code, os.strerror(code), "/runs/x/file")

    with pytest.raises(Agreed) as caught:
        run_on_rank0(SingleProcess(), fail)
    return caught.value


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_path_need_and_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """One line says what failed, what was needed and what is free, whichever error the system calls it."""
    monkeypatch.setattr(durable_files, "free", lambda _: 400_000_000)
    expected = f"disk full: needs 3.1 GB, 400.0 MB free in {tmp_path} (/runs/x/file: {os.strerror(code)})"
    assert described(_failed(code), tmp_path, 3_100_000_000) == expected


def test_other_io_errors_keep_the_words_of_the_system(tmp_path: Path) -> None:
    """With the path."""
    assert described(_failed(errno.EIO), tmp_path, 1) == "/runs/x/file: Input/output error"


def test_free_space_of_a_missing_folder_is_no_second_error(tmp_path: Path) -> None:
    """If the folder is gone, the line says that its free space is unknown."""
    assert "an unknown number of bytes free in" in described(_failed(errno.ENOSPC), tmp_path / "gone", 7)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (3_140_000_000, "3.1 GB"), (5 * 10**16, "50000.0 TB")],
)
def test_sizes_are_written_for_people(count: int, words: str) -> None:
    """In powers of a thousand, as disks are sold."""
    assert size(count) == words


def _restore(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, numbers: int = 1000) -> None:
    monkeypatch.setattr(durable_files, "free", lambda _: free)
    checkpointer(folder, {"memory": Memory({"weight": torch.zeros(numbers)})}).restore()


def test_without_room_for_one_the_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what is needed, what is there, and where."""
    with pytest.raises(UserError) as caught:
        _restore(tmp_path, monkeypatch, 3999)
    assert str(caught.value).startswith(f"{tmp_path}/checkpoints: a checkpoint needs 4.0 kB, and 4.0 kB are free; make")


def test_without_room_for_two_it_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the old one is there while the new one is written."""
    _restore(tmp_path, monkeypatch, 8000)
    assert not caplog.records
    _restore(tmp_path, monkeypatch, 7999)
    [record] = caplog.records
    assert "a checkpoint will need about 4.0 kB, and 8.0 kB are free" in record.getMessage()


def test_what_the_last_one_had_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state may be larger on the disk than it looks at the start."""
    save_steps(tmp_path, 1)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step-1").glob("r*"))
    monkeypatch.setattr(durable_files, "free", lambda _: 2 * size - 1)
    checkpointer(tmp_path, {"memory": Memory()}).restore()
    assert len(caplog.records) == 1


def test_an_optimizer_that_has_not_stepped_counts_for_two_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state is empty at first, and then the larger part of a checkpoint."""
    states = {"stages": SpreadMemory({"w": torch.zeros(1000)}), "optimizer": SpreadMemory({}, names=["w"])}
    monkeypatch.setattr(durable_files, "free", lambda _: 23_999)
    checkpointer(tmp_path, states).restore()
    assert "will need about 12.0 kB" in caplog.text
