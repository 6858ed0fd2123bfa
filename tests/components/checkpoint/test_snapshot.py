"""Checkpoints that are written while training goes on."""

import errno
import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.reader import load_node
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.checkpoint.staging.copy_plan import Copy
from drawloom.components.checkpoint.staging.none import NoStaging
from drawloom.components.checkpoint.staging.overlapped import Overlapped
from drawloom.components.ports.run import Step
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import FileWriter
from drawloom.graph import UserError
from support.checkpoints import Diary, Memory, checkpointer, restored, state_of

STAGERS = [Blocking, Overlapped]


@attrs.define
class Disk:
    """A disk that is slow or broken when a thread other than the main one writes."""

    open: threading.Event = attrs.field(factory=threading.Event)
    reached: threading.Event = attrs.field(factory=threading.Event)
    fault: Exception | None = None
    written: int = 0

    def slow(self) -> None:
        """Let nothing through for now."""
        self.open.clear()
        self.reached.clear()

    @contextmanager
    def new_file(self, path: Path) -> Iterator[FileWriter]:
        """As the real one, when it lets it through."""
        self.reached.set()
        self.open.wait(20)
        if self.fault is not None:
            raise self.fault
        self.written += 1
        with REAL_NEW_FILE(path) as file:
            yield file


REAL_NEW_FILE = durable_files.new_file


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Open, and again at the end."""
    disk = Disk()
    disk.open.set()
    monkeypatch.setattr(durable_files, "new_file", disk.new_file)
    yield disk
    disk.open.set()


def _node(folder: Path, memory: Memory, staging: Any = None, **settings: Any) -> Checkpointer:
    return checkpointer(folder, {"memory": memory}, staging=staging or Blocking(), **{"every": 1, **settings})


def _full(path: str = "/x") -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def _wait(node: Checkpointer) -> None:
    """Until a checkpoint that is being written is done, without telling the node."""
    end = time.monotonic() + 10
    while node._writing is not None and not node._writing.done.done() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("staging", STAGERS)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, disk: Disk, staging: type) -> None:
    """The state changes before anything is on the disk, and what is committed is the state of the step."""
    memory = Memory(state_of(1))
    node = _node(tmp_path, memory, staging())
    disk.slow()
    node.run_phase(Step(1, 9))
    assert disk.reached.wait(10)
    node.staged()
    memory.state["weight"].zero_()
    memory.state["step"] = 2
    assert not (tmp_path / "checkpoints/step-1").exists()
    disk.open.set()
    _wait(node)
    assert restored(tmp_path) == 1


@pytest.mark.parametrize("staging", STAGERS)
def test_the_state_may_change_at_once_a_hundred_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: type
) -> None:
    """Saved at a step and changed right after: each checkpoint is of its step."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # saves nine tenths of the time
    memory = Memory()
    node = _node(tmp_path, memory, staging(), keep=1)
    weight = torch.zeros(50_000)
    for index in range(1, 101):
        weight.fill_(index)
        memory.state = {"weight": weight, "small": weight[:3]}
        node.run_phase(Step(index, 1000))
        node.staged()
        weight.fill_(-1)
        _wait(node)
        found = load_node(tmp_path / f"checkpoints/step-{index}", "memory")
        assert set(found["weight"].tolist()) == {index} and found["small"].tolist() == [index] * 3


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, disk: Disk) -> None:
    """There is never more than one copy, however slow the disk is."""
    memory = Memory(state_of(1))
    node = _node(tmp_path, memory)
    disk.slow()
    node.run_phase(Step(1, 9))
    memory.state = state_of(2)
    second = threading.Thread(target=node.run_phase, args=(Step(2, 9),))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    disk.open.set()
    second.join(10)
    _wait(node)
    assert restored(tmp_path) == 2


def test_the_last_step_waits_for_its_commit(tmp_path: Path) -> None:
    """When the last step is over its checkpoint is there; so it is after a signal."""
    memory = Memory(state_of(5))
    _node(tmp_path, memory).run_phase(Step(5, 5))
    assert restored(tmp_path) == 5
    memory.state = state_of(6)
    _node(tmp_path, memory).save(Step(6, 9))
    assert restored(tmp_path) == 6


def test_a_signal_during_a_save_waits_for_it_and_saves_its_own_step(tmp_path: Path, disk: Disk) -> None:
    """What was begun is committed, and so is the step at which the run stops; of one step there is one save."""
    memory, diary = Memory(state_of(1)), Diary()
    node = _node(tmp_path, memory, events=diary, every=5)
    disk.slow()
    node.run_phase(Step(5, 9))
    memory.state = state_of(6)
    threading.Timer(0.1, disk.open.set).start()
    node.save(Step(6, 9))
    node.save(Step(6, 9))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-5", "step-6"}
    assert diary.told == [(moment, step) for step in (5, 6) for moment in ("saving_started", "saving_ended")]


def test_a_signal_waits_for_the_save_of_its_own_step(tmp_path: Path, disk: Disk) -> None:
    """If it is being written already, it is not written a second time."""
    memory = Memory(state_of(1))
    node = _node(tmp_path, memory)
    disk.slow()
    node.run_phase(Step(1, 9))
    threading.Timer(0.1, disk.open.set).start()
    node.save(Step(1, 9))
    assert restored(tmp_path) == 1
    assert disk.written == 4  # tree, tensors, recipe and manifest, once each


def test_closing_waits_for_what_is_being_written(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails in a later step keeps what it had begun to save; but it does not wait for ever."""
    memory = Memory(state_of(1))
    node = _node(tmp_path, memory)
    disk.slow()
    node.run_phase(Step(1, 9))
    threading.Timer(0.1, disk.open.set).start()
    node.close()
    assert restored(tmp_path) == 1
    other = _node(tmp_path / "other", memory)
    disk.slow()
    other.run_phase(Step(1, 9))
    monkeypatch.setattr("drawloom.components.checkpoint.checkpointer.CLOSE_TIMEOUT", 0.05)
    other.close()
    assert not (tmp_path / "other/checkpoints/step-1").exists()


@pytest.mark.parametrize("staging", [*STAGERS, NoStaging, None])
def test_a_full_disk_skips_a_checkpoint_and_training_goes_on(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, staging: type | None
) -> None:
    """One line says so; what was committed is untouched, nothing is left over, and the next save is tried."""
    memory = Memory(state_of(1))
    node = checkpointer(tmp_path, {"memory": memory}, every=1, staging=staging and staging())
    node.run_phase(Step(1, 9))
    _wait(node)
    disk.fault = _full("/x")
    node.run_phase(Step(2, 9))
    _wait(node)
    node.run_phase(Step(3, 9))
    _wait(node)
    disk.fault = None
    memory.state = state_of(4)
    node.run_phase(Step(4, 9))
    _wait(node)
    node.run_phase(Step(5, 9))
    node.close()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" free in")[1] for line in said] == [
        f" {tmp_path}/checkpoints (/x: No space left on device)"
    ] * 2
    assert [line.split(": needs ")[0] for line in said] == [f"checkpoint {step} skipped: disk full" for step in (2, 3)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-4", "step-5"]


def test_so_many_failures_in_a_row_stop_the_run(tmp_path: Path, disk: Disk) -> None:
    """As many as the setting says, and a success in between starts the count anew."""
    memory = Memory(state_of(1))
    node = _node(tmp_path, memory, failures=3)
    for index in (1, 2):
        disk.fault = _full()
        node.run_phase(Step(index, 99))
        _wait(node)
    disk.fault = None
    node.run_phase(Step(3, 99))
    _wait(node)
    disk.fault = _full()
    for index in (4, 5, 6):
        node.run_phase(Step(index, 99))
        _wait(node)
    with pytest.raises(UserError, match=r"^3 checkpoints in a row failed, at last the one after step 6: disk full: .*"):
        node.run_phase(Step(7, 99))


def test_the_last_checkpoint_must_not_fail(tmp_path: Path, disk: Disk) -> None:
    """A run whose end is not saved does not say that all is well."""
    node = _node(tmp_path, Memory(state_of(1)))
    disk.fault = _full()
    with pytest.raises(UserError, match=r"^the checkpoint after step 9 failed: disk full"):
        node.run_phase(Step(9, 9))


def test_a_checkpoint_that_failed_can_be_tried_again(tmp_path: Path, disk: Disk) -> None:
    """A signal at the step whose save has just failed saves it."""
    node = _node(tmp_path, Memory(state_of(1)), NoStaging())
    disk.fault = _full()
    node.run_phase(Step(1, 9))
    disk.fault = None
    node.save(Step(1, 9))
    assert restored(tmp_path) == 1


@pytest.mark.parametrize("last", [False, True])
def test_other_failures_are_raised_at_the_next_step_or_at_the_end(tmp_path: Path, disk: Disk, last: bool) -> None:
    """A fault of the program is not lived with, and not lost, wherever it happens."""
    node = _node(tmp_path, Memory(state_of(1)), every=5)
    disk.fault = ZeroDivisionError("a fault")
    if last:
        with pytest.raises(ZeroDivisionError):
            node.run_phase(Step(5, 5))
        return
    node.run_phase(Step(5, 99))
    _wait(node)
    with pytest.raises(ZeroDivisionError):
        node.run_phase(Step(6, 99))


def test_a_failed_copy_is_raised_before_the_state_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was committed before is untouched."""
    memory = Memory({"weight": torch.zeros(100_000)})
    node = _node(tmp_path, memory, Overlapped())
    node.run_phase(Step(1, 9))
    _wait(node)

    def fail(_copy: Copy, **_: Any) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(Copy, "make", fail)
    node.run_phase(Step(2, 9))
    with pytest.raises(MemoryError, match="no memory left"):
        node.staged()
    node.close()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-1"]


def test_what_can_t_be_staged_is_raised_at_once(tmp_path: Path) -> None:
    """With the path; and the listeners hear that saving has ended."""
    diary = Diary()
    node = _node(tmp_path, Memory({"bad": {1}}), events=diary)
    with pytest.raises(TypeError, match="memory/bad is a set"):
        node.run_phase(Step(1, 9))
    assert diary.told == [("saving_started", 1), ("saving_ended", 1)]


def test_listeners_wait_longer_while_the_state_is_copied_only(tmp_path: Path, disk: Disk) -> None:
    """What is written in the background is no part of any step."""
    diary = Diary()
    node = _node(tmp_path, Memory(state_of(1)), events=diary)
    disk.slow()
    node.run_phase(Step(1, 9))
    assert diary.told == [("saving_started", 1), ("saving_ended", 1)]


def test_memory_for_copies_does_not_grow(tmp_path: Path) -> None:
    """After a save nobody holds the copy, a failed one included, so that the next takes its place."""
    stager = Blocking()
    node = _node(tmp_path, Memory({"weight": torch.zeros(300_000)}), stager)
    for index in range(1, 6):
        node.run_phase(Step(index, 99))
        _wait(node)
    node.run_phase(Step(6, 99))
    node.close()
    gc.collect()
    places = set()
    for index in range(7, 12):
        node.run_phase(Step(index, 99))
        _wait(node)
        node._finish()
        assert stager._pool is not None
        places |= {id(buffer) for buffer in stager._pool._unused}
    assert len(places) == 1


def test_records_last_before_the_checkpoint_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is written down of a step is on the disk when its checkpoint is; if that fails it is warned."""
    seen: list[list[str]] = []

    class Record:
        fault: OSError | None = None

        def flush(self) -> None:
            seen.append([path.name for path in (tmp_path / "checkpoints").glob("step-*")])
            if self.fault:
                raise self.fault

    record = Record()
    node = _node(tmp_path, Memory(state_of(1)), records={"trackers.jsonl": record})
    node.save(Step(1, 9))
    record.fault = OSError(errno.EIO, "Input/output error")
    node.save(Step(2, 9))
    assert seen == [[], ["step-1"]]
    assert "[trackers.jsonl] is not safe from a power cut: [Errno 5] Input/output error" in caplog.text
