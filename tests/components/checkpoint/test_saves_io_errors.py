"""Free disk space, and I/O errors of saves."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.checkpoint.saves import describe_io_error_on_all_ranks
from drawloom.components.distributed.rank_errors import RankError, run_on_rank0
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.ports.run import Step
from drawloom.components.storage import durable_files
from drawloom.graph import UserError
from support.checkpoints import ShardedNode, StateNode, checkpointer, save_steps


def _error_of_rank(code: int) -> RankError:
    """Return the error on a rank with a failed system call."""

    def fail() -> None:
        raise OSError(code, os.strerror(code), "/runs/x/file")

    with pytest.raises(RankError) as caught:
        run_on_rank0(SingleProcess(), fail)
    return caught.value


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_with_path_need_and_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """One line has the error, the needed bytes and the free bytes, for every errno from a full disk."""
    monkeypatch.setattr(durable_files, "count_free_bytes", lambda _: 400_000_000)
    expected = f"disk full: needs 3.10 GB, 400.0 MB free in {tmp_path} (/runs/x/file: {os.strerror(code)})"
    assert describe_io_error_on_all_ranks(_error_of_rank(code), tmp_path, 3_100_000_000, SingleProcess()) == expected


def test_other_io_errors_keep_the_message_of_the_system(tmp_path: Path) -> None:
    """The message has the path."""
    assert (
        describe_io_error_on_all_ranks(_error_of_rank(errno.EIO), tmp_path, 1, SingleProcess())
        == "/runs/x/file: Input/output error"
    )


def test_a_limit_on_file_sizes_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    """Freeing space would not help, so the message names the limit."""
    text = describe_io_error_on_all_ranks(_error_of_rank(errno.EFBIG), tmp_path, 1, SingleProcess())
    assert text.startswith("/runs/x/file: File too large: a limit on the size of files")


def test_free_space_of_a_missing_folder_raises_no_second_error(tmp_path: Path) -> None:
    """If the folder is gone, the line says that its free space is unknown."""
    text = describe_io_error_on_all_ranks(_error_of_rank(errno.ENOSPC), tmp_path / "gone", 7, SingleProcess())
    assert "an unknown number of bytes free in" in text


class TwoMachines(SingleProcess):
    """A group of two ranks with different disks."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value, "1.00 GB"]


def test_free_space_is_measured_on_the_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports the free space on the machine of rank 1, whose disk is full."""
    monkeypatch.setattr(durable_files, "count_free_bytes", lambda _: 400_000_000)
    error = RankError("rank 1: full", 1, rank=1, errno=errno.ENOSPC)
    assert "1.00 GB free in" in describe_io_error_on_all_ranks(error, tmp_path, 7, TwoMachines())


class _Optimizer(ShardedNode):
    """A sharded node whose moments appear in its first step."""

    def forecast_state_after_first_step(self) -> dict[str, Any]:
        """Return two moments of 1,000 numbers, on the meta device."""
        return {"w": {"first": torch.empty(1000, device="meta"), "second": torch.empty(1000, device="meta")}}


def _states() -> dict[str, StateNode]:
    """Return weights of 4 kB, and an optimizer whose moments will be 8 kB."""
    return {"stages": ShardedNode({"w": torch.zeros(1000)}), "optimizer": _Optimizer({"w": {}})}


def _restore(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(durable_files, "count_free_bytes", lambda _: free)
    checkpointer(folder, _states()).restore()


def _bytes_on_disk(folder: Path, state: dict[str, StateNode]) -> int:
    """Return the size of the ranks' files in a checkpoint."""
    checkpointer(folder, state).save(Step(1, 1))
    return sum(path.stat().st_size for path in (folder / "checkpoints/step-1").glob("rank*"))


def test_without_space_for_one_checkpoint_no_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's future moments count; the error has the folder, the needed bytes and the free bytes."""
    with pytest.raises(UserError) as caught:
        _restore(tmp_path, monkeypatch, 11_999)
    text = str(caught.value)
    assert re.match(rf"{tmp_path}/checkpoints: a checkpoint needs about 12\.\d kB, and 12\.0 kB are free; free", text)


def test_a_forecast_is_as_large_as_the_checkpoint_after_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts if the first checkpoint's files would fit exactly, and not with 3 % less space."""
    states = _states()
    states["optimizer"].state = {"w": {"first": torch.zeros(1000), "second": torch.zeros(1000)}}
    size = _bytes_on_disk(tmp_path / "full", states)
    _restore(tmp_path / "roomy", monkeypatch, size)
    with pytest.raises(UserError, match="a checkpoint needs about"):
        _restore(tmp_path / "tight", monkeypatch, int(0.97 * size))


def test_without_space_for_two_checkpoints_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old checkpoint exists while the new one is written."""
    _restore(tmp_path, monkeypatch, 26_000)
    assert not caplog.records
    _restore(tmp_path, monkeypatch, 23_999)
    [record] = caplog.records
    assert "a checkpoint will need about 12." in record.getMessage()
    assert "and 24.0 kB are free" in record.getMessage()


def test_the_size_of_the_last_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state may be larger on disk than its estimate at the start."""
    save_steps(tmp_path, 1)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step-1").glob("r*"))
    monkeypatch.setattr(durable_files, "count_free_bytes", lambda _: 2 * size - 1)
    checkpointer(tmp_path, {"memory": StateNode()}).restore()
    assert len(caplog.records) == 1
