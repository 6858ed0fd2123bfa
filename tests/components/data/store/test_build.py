"""Making a token store, also after failures, kills, and beside other processes."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.sources.documents import Part
from drawloom.components.data.store.build import build_store
from drawloom.components.data.store.store import LOCK
from drawloom.components.storage.durable_files import FileWriter
from drawloom.graph import UserError
from support.stores import PARTS, Failing, Texts, content, damage, make_blocked, make_slowly, store_of


def same(folder: Path, tmp_path: Path) -> bool:
    """Whether a store equals, byte for byte, one made without interruption."""
    build_store(tmp_path / "unbroken", PARTS, Bytes())
    return content(folder) == content(tmp_path / "unbroken")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_store_is_completed(tmp_path: Path, workers: int) -> None:
    """An error in a part is raised as it is; once it is gone, the store is completed, as if there had been none."""
    (tmp_path / "flag").touch()
    parts: list[Part] = [*PARTS[:4], Failing(PARTS[4], tmp_path / "flag"), PARTS[5]]
    with pytest.raises(UserError, match="part 4: broken"):
        build_store(tmp_path / "store", parts, Bytes(), workers=workers)
    assert not (tmp_path / "store" / "store.json").exists()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*.json")}
    (tmp_path / "flag").unlink()
    build_store(tmp_path / "store", parts, Bytes(), workers=workers)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items() if path.name != "plan.json")
    assert same(tmp_path / "store", tmp_path)


def test_a_killed_store_is_completed_byte_for_byte(tmp_path: Path) -> None:
    """Killed while its processes write, it is completed by the same call; its processes end with it."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=make_slowly, args=(tmp_path / "store",))
    process.start()
    while process.is_alive() and not (tmp_path / "store" / "00001.json").exists():
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "store" / "store.json").exists()
    build_store(tmp_path / "store", PARTS, Bytes())
    assert same(tmp_path / "store", tmp_path)


def test_a_store_killed_before_its_plan_is_begun_again(tmp_path: Path) -> None:
    """A process killed while it writes the plan leaves a part of it, and the next one begins anew."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".plan.json.tmp").write_text('{"inputs', "utf-8")
    build_store(tmp_path / "store", PARTS, Bytes())
    assert same(tmp_path / "store", tmp_path)


@pytest.mark.soak
def test_children_of_a_killed_process_end_before_the_next_one_writes(tmp_path: Path) -> None:
    """Its processes notice its end at their next report, and would then remove the next process's files."""
    folder, flag, said = tmp_path / "store", tmp_path / "flag", list[str]()
    flag.touch()
    process = multiprocessing.get_context("spawn").Process(target=make_blocked, args=(folder, flag))
    process.start()
    while process.is_alive() and len([*folder.glob("*.tokens")]) < 2:
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    later = threading.Thread(target=build_store, args=(folder, PARTS, Bytes()), kwargs={"say": said.append})
    later.start()
    while later.is_alive() and not said:
        time.sleep(0.01)
    assert "waiting for the process that tokenizes into" in said[0]
    flag.unlink()
    later.join()
    assert same(folder, tmp_path)


def test_a_damaged_shard_of_an_incomplete_store_is_made_again(tmp_path: Path) -> None:
    """A shard whose file was cut off, as by a power cut, does not count as complete."""
    (tmp_path / "flag").touch()
    with pytest.raises(UserError):
        build_store(tmp_path / "store", [*PARTS[:5], Failing(PARTS[5], tmp_path / "flag")], Bytes())
    path = tmp_path / "store" / "00002.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    build_store(tmp_path / "store", PARTS, Bytes())
    assert same(tmp_path / "store", tmp_path)


def test_a_complete_store_is_only_opened(tmp_path: Path) -> None:
    """A second call writes nothing."""
    build_store(tmp_path / "store", PARTS, Bytes())
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    build_store(tmp_path / "store", PARTS, Bytes())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == times


def test_another_store_is_refused(tmp_path: Path) -> None:
    """A folder with a store of other files, or with other things, is left as it is."""
    store_of(tmp_path / "store", [["abc"]])
    with pytest.raises(UserError, match="holds a store of other files"):
        store_of(tmp_path / "store", [["abd"]])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        store_of(tmp_path / "mine", [["abc"]])
    damage(tmp_path / "store" / "store.json", 0)
    with pytest.raises(UserError, match=r"store\.json can't be read"):
        store_of(tmp_path / "store", [["abc"]])


def test_two_processes_take_turns(tmp_path: Path) -> None:
    """While another process has the folder the second says so, waits, and finds the store complete."""
    store_of(tmp_path / "store", [["abc"]])
    said: list[str] = []
    descriptor = os.open(tmp_path / "store" / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    parts = [Texts(("abc",), "part 0")]
    waiting = threading.Thread(
        target=build_store, args=(tmp_path / "store", parts, Bytes()), kwargs={"say": said.append}
    )
    waiting.start()
    while not said:
        time.sleep(0.01)
    assert waiting.is_alive() and "waiting for the process that tokenizes into" in said[0]
    os.close(descriptor)
    waiting.join()
    assert len(said) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path below a file is an error with the path."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/store: can't be written"):
        store_of(tmp_path / "file" / "store", [["abc"]])


def test_a_full_disk_is_an_error_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard can't be written, the error names the store and the reason; later the same call completes it."""
    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "write_at", fail)
        with pytest.raises(UserError, match=r"store: the token store can't be written \(No space left on device"):
            build_store(tmp_path / "store", PARTS, Bytes())
    build_store(tmp_path / "store", PARTS, Bytes())
    assert same(tmp_path / "store", tmp_path)


def fail(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "00000.tokens")
