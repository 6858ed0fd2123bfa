"""Checkpoints written while training continues."""

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
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.checkpoint.staging.copy_plan import Copy
from drawloom.components.checkpoint.staging.none import NoStaging
from drawloom.components.checkpoint.staging.overlapped import Overlapped
from drawloom.components.ports.run import Step
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import FileWriter
from drawloom.graph import UserError
from support.checkpoints import StateNode, checkpointer, restore_step, state_of

STAGERS = [Blocking, Overlapped]


@attrs.define
class Disk:
    """A disk that is slow or broken for background threads."""

    open: threading.Event = attrs.field(factory=threading.Event)
    reached: threading.Event = attrs.field(factory=threading.Event)
    fault: Exception | None = None
    written: int = 0

    def slow(self) -> None:
        """Block all writes."""
        self.open.clear()
        self.reached.clear()

    @contextmanager
    def new_file(self, path: Path) -> Iterator[FileWriter]:
        """Write as the real disk does, unless blocked or broken."""
        self.reached.set()
        self.open.wait(20)
        if self.fault is not None:
            raise self.fault
        self.written += 1
        with REAL_NEW_FILE(path) as file:
            yield file


REAL_NEW_FILE = durable_files.create_new_durable_file


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Yield a fake disk, unblocked after the test."""
    disk = Disk()
    disk.open.set()
    monkeypatch.setattr(durable_files, "create_new_durable_file", disk.new_file)
    yield disk
    disk.open.set()


def _node(folder: Path, memory: StateNode, staging: Any = None, **settings: Any) -> Checkpointer:
    return checkpointer(folder, {"memory": memory}, staging=staging or Blocking(), **{"every": 1, **settings})


def _full(path: str = "/x") -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def _wait(node: Checkpointer) -> None:
    """Wait until the pending save is done, without the node's knowledge."""
    end = time.monotonic() + 10
    while (pending := node._saves._pending) is not None and not pending.done.done() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("staging", STAGERS)
def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, disk: Disk, staging: type) -> None:
    """The state changes before anything is on disk, and the committed state is the saved step's."""
    memory = StateNode(state_of(1))
    node = _node(tmp_path, memory, staging())
    disk.slow()
    node.run_phase(Step(1, 9))
    assert disk.reached.wait(10)
    node.wait_until_staged()
    memory.state["weight"].zero_()
    memory.state["step"] = 2
    assert not (tmp_path / "checkpoints/step-1").exists()
    disk.open.set()
    _wait(node)
    assert restore_step(tmp_path) == 1


@pytest.mark.parametrize("staging", STAGERS)
def test_a_state_changed_right_after_a_save_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: type
) -> None:
    """A hundred checkpoints all have their step's state."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # saves nine tenths of the time
    memory = StateNode()
    node = _node(tmp_path, memory, staging(), keep=1)
    weight = torch.zeros(50_000)
    for index in range(1, 101):
        weight.fill_(index)
        memory.state = {"weight": weight, "small": weight[:3]}
        node.run_phase(Step(index, 1000))
        node.wait_until_staged()
        weight.fill_(-1)
        _wait(node)
        loaded = load_node_state(tmp_path / f"checkpoints/step-{index}", "memory")
        assert set(loaded["weight"].tolist()) == {index} and loaded["small"].tolist() == [index] * 3


def test_the_next_save_waits_for_the_pending_one(tmp_path: Path, disk: Disk) -> None:
    """There is never more than one copy, however slow the disk is."""
    memory = StateNode(state_of(1))
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
    assert restore_step(tmp_path) == 2


def test_the_last_step_waits_for_its_commit(tmp_path: Path) -> None:
    """The last step and a signal return after the checkpoint is committed."""
    memory = StateNode(state_of(5))
    _node(tmp_path, memory).run_phase(Step(5, 5))
    assert restore_step(tmp_path) == 5
    memory.state = state_of(6)
    _node(tmp_path, memory).save(Step(6, 9))
    assert restore_step(tmp_path) == 6


def test_a_signal_during_a_save_waits_for_it_and_saves_its_own_step(tmp_path: Path, disk: Disk) -> None:
    """The pending save is committed, and then the step at which the run stops."""
    memory = StateNode(state_of(1))
    node = _node(tmp_path, memory, every=5)
    disk.slow()
    node.run_phase(Step(5, 9))
    memory.state = state_of(6)
    threading.Timer(0.1, disk.open.set).start()
    node.save(Step(6, 9))
    node.save(Step(6, 9))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-5", "step-6"}
    assert disk.written == 8  # tree, tensors, recipe and manifest of each, once


def test_a_signal_waits_for_the_save_of_its_own_step(tmp_path: Path, disk: Disk) -> None:
    """A pending step is not saved a second time."""
    memory = StateNode(state_of(1))
    node = _node(tmp_path, memory)
    disk.slow()
    node.run_phase(Step(1, 9))
    threading.Timer(0.1, disk.open.set).start()
    node.save(Step(1, 9))
    assert restore_step(tmp_path) == 1
    assert disk.written == 4  # tree, tensors, recipe and manifest, once each


def test_closing_waits_for_the_pending_save(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later failure keeps the pending save, but waits only for the timeout."""
    memory = StateNode(state_of(1))
    node = _node(tmp_path, memory)
    disk.slow()
    node.run_phase(Step(1, 9))
    threading.Timer(0.1, disk.open.set).start()
    node.close()
    assert restore_step(tmp_path) == 1
    other = _node(tmp_path / "other", memory)
    disk.slow()
    other.run_phase(Step(1, 9))
    monkeypatch.setattr("drawloom.components.checkpoint.saves.CLOSE_TIMEOUT", 0.05)
    other.close()
    assert not (tmp_path / "other/checkpoints/step-1").exists()


@pytest.mark.parametrize("staging", [*STAGERS, NoStaging, None])
def test_a_full_disk_skips_a_checkpoint_and_training_continues(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, staging: type | None
) -> None:
    """It is one warning; earlier checkpoints are unchanged, nothing is left over, and the next save is tried."""
    memory = StateNode(state_of(1))
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
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" free in")[1] for line in warnings] == [
        f" {tmp_path}/checkpoints (/x: No space left on device)"
    ] * 2
    skipped = [line.split(": needs ")[0] for line in warnings]
    assert skipped == [f"checkpoint {step} skipped: disk full" for step in (2, 3)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-4", "step-5"]


def test_failures_in_a_row_stop_the_run(tmp_path: Path, disk: Disk) -> None:
    """The run stops after as many as the setting; a success in between resets the count."""
    memory = StateNode(state_of(1))
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


def test_a_failed_last_checkpoint_is_an_error(tmp_path: Path, disk: Disk) -> None:
    """A run whose last state is not saved does not exit with success."""
    node = _node(tmp_path, StateNode(state_of(1)))
    disk.fault = _full()
    with pytest.raises(UserError, match=r"^the checkpoint after step 9 failed: disk full"):
        node.run_phase(Step(9, 9))


def test_a_failed_save_can_be_repeated(tmp_path: Path, disk: Disk) -> None:
    """A signal at the step whose save has just failed saves it."""
    node = _node(tmp_path, StateNode(state_of(1)), NoStaging())
    disk.fault = _full()
    node.run_phase(Step(1, 9))
    disk.fault = None
    node.save(Step(1, 9))
    assert restore_step(tmp_path) == 1


@pytest.mark.parametrize("last", [False, True])
def test_other_failures_are_raised_at_the_next_step_or_at_the_end(tmp_path: Path, disk: Disk, last: bool) -> None:
    """A bug is never skipped as an I/O error, wherever it happens."""
    node = _node(tmp_path, StateNode(state_of(1)), every=5)
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
    """Earlier checkpoints are unchanged."""
    memory = StateNode({"weight": torch.zeros(100_000)})
    node = _node(tmp_path, memory, Overlapped())
    node.run_phase(Step(1, 9))
    _wait(node)

    def fail(_copy: Copy, **_: Any) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(Copy, "copy_tensor", fail)
    node.run_phase(Step(2, 9))
    with pytest.raises(MemoryError, match="no memory left"):
        node.wait_until_staged()
    node.close()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-1"]


def test_a_value_that_cannot_be_staged_raises_at_once(tmp_path: Path) -> None:
    """The error has the path."""
    node = _node(tmp_path, StateNode({"bad": {1}}))
    with pytest.raises(TypeError, match="memory/bad is a set"):
        node.run_phase(Step(1, 9))


def test_memory_for_copies_does_not_grow(tmp_path: Path) -> None:
    """After a save, even a failed one, no reference to the copy is left, and its memory is reused."""
    stager = Blocking()
    node = _node(tmp_path, StateNode({"weight": torch.zeros(300_000)}), stager)
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
        node._saves.wait_for_pending_save()
        assert stager._pool is not None
        places |= {id(buffer) for buffer in stager._pool._unused}
    assert len(places) == 1


def test_metric_logs_are_flushed_before_the_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step's logs are on disk before its checkpoint, also lines a report passes on; a failed flush is a warning."""
    seen: list[list[str]] = []
    waiting: list[str] = []

    class Record:
        fault: OSError | None = None

        def flush(self) -> None:
            assert waiting == ["line"]
            waiting.clear()
            seen.append([path.name for path in (tmp_path / "checkpoints").glob("step-*")])
            if self.fault:
                raise self.fault

    class Reporter:
        def flush(self) -> None:
            waiting.append("line")

    record = Record()
    node = _node(tmp_path, StateNode(state_of(1)), records={"trackers.jsonl": record, "report": Reporter()})
    node.save(Step(1, 9))
    record.fault = OSError(errno.EIO, "Input/output error")
    node.save(Step(2, 9))
    assert seen == [[], ["step-1"]]
    assert (
        "[trackers.jsonl] can't be flushed to disk, and a kill or a power cut would lose lines: Input/output error"
        in caplog.text
    )
