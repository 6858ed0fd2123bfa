"""Whether there is room for checkpoints."""

from pathlib import Path

import pytest
import torch

from drawloom.components.storage import durable_files
from drawloom.graph import UserError
from support.checkpoints import Memory, SpreadMemory, checkpointer, save_steps


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
