"""Folders that appear as a whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drawloom.components.storage.temp_folders import create_temp_folder
from drawloom.graph import UserError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Make a folder, which becomes the target when the block ends."""
    temporary = create_temp_folder(target)
    try:
        yield temporary.folder
        temporary.commit()
    finally:
        temporary.discard()


def test_a_folder_appears_when_done(tmp_path: Path) -> None:
    """Until the block ends there is no target; then it has everything written, and nothing else is left."""
    target = tmp_path / "new" / "export"
    with whole_folder(target) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("text")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "text"
    assert os.listdir(target.parent) == ["export"]


def test_an_exception_removes_the_folder(tmp_path: Path) -> None:
    """An exception leaves neither the target nor anything beside it."""
    with pytest.raises(OSError, match="disk full"), whole_folder(tmp_path / "export") as aside:
        (aside / "file").write_text("half")
        raise OSError("disk full")
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    """A killed attempt's files do not end up in the next one's folder, and nothing waits for a pipe's writer."""
    os.mkfifo(tmp_path / ".export.partial-1")
    killed = create_temp_folder(tmp_path / "export")
    (killed.folder / "stale").write_text("old")
    with whole_folder(tmp_path / "export") as aside:
        (aside / "fresh").write_text("new")
    assert os.listdir(tmp_path) == ["export"]
    assert os.listdir(tmp_path / "export") == ["fresh"]


def test_of_two_concurrent_writers_one_fails(tmp_path: Path) -> None:
    """Two writers for one target never share a folder, so their files are never mixed."""
    first, second = create_temp_folder(tmp_path / "export"), create_temp_folder(tmp_path / "export")
    assert first.folder != second.folder
    (second.folder / "file").write_text("second")
    with pytest.raises(OSError):
        (first.folder / "other").write_text("first")
    second.commit()
    assert os.listdir(tmp_path / "export") == ["file"]


def test_takes_an_empty_folder(tmp_path: Path) -> None:
    """An existing empty target folder is replaced."""
    (tmp_path / "export").mkdir()
    with whole_folder(tmp_path / "export") as aside:
        (aside / "file").write_text("text")
    assert os.listdir(tmp_path / "export") == ["file"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_target_is_refused(tmp_path: Path, kind: str) -> None:
    """A folder, a file or a link at the target is refused before anything is written."""
    target = tmp_path / "export"
    if kind == "folder":
        target.mkdir()
        (target / "precious").write_text("text")
    elif kind == "file":
        target.write_text("text")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(UserError, match="exists already"), whole_folder(target):
        pytest.fail("the block must not run")
    assert os.listdir(tmp_path) == ["export"]


def test_a_relative_path_is_resolved_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative target is resolved when the block begins, also if the current directory changes."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with whole_folder(Path("export")) as aside:
        (aside / "file").write_text("text")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "export" / "file").exists()


def test_everything_is_on_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is flushed before the rename, and the target's parent folder after it."""
    log: list[str] = []
    flush, rename = os.fsync, os.rename

    def log_flush(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def log_rename(old: Path, new: Path) -> None:
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", log_flush)
    monkeypatch.setattr(os, "rename", log_rename)
    with whole_folder(tmp_path / "export") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("text")
    before, after = log[: log.index("rename")], log[log.index("rename") + 1 :]
    assert {"file", "inner"} <= set(before)
    assert any(name.startswith(".export.partial") for name in before)
    assert after == [tmp_path.name]
