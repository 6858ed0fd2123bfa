"""Files and folders that are whole or absent."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drawloom.components.storage.atomic_write import begin, replace_file
from drawloom.graph import UserError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes the target at the end of the block."""
    temporary = begin(target)
    try:
        yield temporary.folder
        temporary.commit()
    finally:
        temporary.discard()


def test_appears_when_done(tmp_path: Path) -> None:
    """Until the block ends there is no target; then it holds all that was written, and nothing else is left."""
    target = tmp_path / "new" / "export"
    with whole_folder(target) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("text")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "text"
    assert os.listdir(target.parent) == ["export"]


def test_vanishes_with_an_exception(tmp_path: Path) -> None:
    """An exception leaves neither the target nor anything beside it."""
    with pytest.raises(OSError, match="disk full"), whole_folder(tmp_path / "export") as aside:
        (aside / "file").write_text("half")
        raise OSError("disk full")
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    """Files of an attempt that was killed do not end up in the next one's folder."""
    killed = begin(tmp_path / "export")
    (killed.folder / "stale").write_text("old")
    with whole_folder(tmp_path / "export") as aside:
        (aside / "fresh").write_text("new")
    assert os.listdir(tmp_path) == ["export"]
    assert os.listdir(tmp_path / "export") == ["fresh"]


def test_of_two_concurrent_writers_one_fails(tmp_path: Path) -> None:
    """Two writers of one target never share a folder, so that files of both are never mixed."""
    first, second = begin(tmp_path / "export"), begin(tmp_path / "export")
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
def test_never_replaces_anything(tmp_path: Path, kind: str) -> None:
    """A target that holds something is refused before anything is written."""
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


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative target is resolved when the block begins, also if the current directory changes."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with whole_folder(Path("export")) as aside:
        (aside / "file").write_text("text")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "export" / "file").exists()


def test_everything_is_on_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is flushed before the rename, and the folder that holds the target after it."""
    log: list[str] = []
    flush, rename = os.fsync, os.rename

    def logged_flush(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def logged_rename(old: Path, new: Path) -> None:
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", logged_flush)
    monkeypatch.setattr(os, "rename", logged_rename)
    with whole_folder(tmp_path / "export") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("text")
    before, after = log[: log.index("rename")], log[log.index("rename") + 1 :]
    assert {"file", "inner"} <= set(before)
    assert any(name.startswith(".export.partial") for name in before)
    assert after == [tmp_path.name]


def test_a_replaced_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is flushed before the rename, the name after it, and the old content is whole until then."""
    path, log = tmp_path / "file", list[str]()
    path.write_text("old")
    fsync, rename = os.fsync, os.rename

    def logged_fsync(descriptor: int) -> None:
        log.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}: {path.read_text()}")
        fsync(descriptor)

    def logged_rename(old: Path, new: Path) -> None:
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    replace_file(path, b"new")
    assert log == ["fsync .file.tmp: old", "rename", f"fsync {tmp_path.name}: new"]


def test_a_file_that_can_not_be_replaced_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the old content, and nothing beside it; what a killed process left is no obstacle."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    (tmp_path / ".file.tmp").write_text("half")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])
    (tmp_path / ".file.tmp").write_text("half")
    replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("new", ["file"])
