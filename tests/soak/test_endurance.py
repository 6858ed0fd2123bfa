"""Long tests of checkpoints with many faults."""

import errno
import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.commit import CorruptCheckpointError
from drawloom.components.checkpoint.reader import find_newest_valid_checkpoint, load_node_state, verify_checkpoint
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import LocalNode, StateNode, checkpointer, state_of
from support.disk import FailAt, watch_calls
from support.processes import run_ranks


def _flip(path: Path, moments: random.Random) -> None:
    data = bytearray(path.read_bytes())
    position = moments.randrange(len(data) - (path.name == "manifest.json"))  # its final newline does not matter
    data[position] ^= 1 << moments.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, moments: random.Random) -> None:
    os.truncate(path, moments.randrange(path.stat().st_size))


def _zero(path: Path, moments: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = moments.randrange(len(data) - 1)
    data[start:] = bytes(len(data) - start)
    path.write_bytes(data)


def _grow(path: Path, moments: random.Random) -> None:
    with path.open("ab") as file:
        file.write(moments.randbytes(moments.randrange(1, 9)))


@pytest.mark.parametrize(("corrupt", "times"), [(_flip, 150), (_cut, 50), (_zero, 50), (_grow, 50)])
def test_every_corruption_of_every_file_is_detected(
    tmp_path: Path, corrupt: Callable[[Path, random.Random], None], times: int
) -> None:
    """Random corruption of any checkpoint file is detected, and the error names the file."""
    memory = StateNode({"weight": torch.randn(300), "list": list(range(30))})
    checkpointer(tmp_path, {"memory": memory, "own": LocalNode(state_of(1))}).save(Step(1, 9, state={"loss": 0.5}))
    checkpoint, moments = tmp_path / "checkpoints/step-1", random.Random(5)
    names = sorted(os.listdir(checkpoint))
    for _ in range(times):
        path = checkpoint / moments.choice(names)
        good = path.read_bytes()
        while path.read_bytes() == good or (path.name == "manifest.json" and path.read_bytes().strip() == good.strip()):
            path.write_bytes(good)
            corrupt(path, moments)
        with pytest.raises(CorruptCheckpointError, match=path.name):
            verify_checkpoint(checkpoint)
        path.write_bytes(good)
    verify_checkpoint(checkpoint)


class Folder(RuleBasedStateMachine):
    """
    Run folder with random faults. Restoring returns the newest valid committed checkpoint, or raises if there is none.
    """

    @initialize()
    def begin(self) -> None:
        """Create an empty folder, and start a run in it."""
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.memory = StateNode()
        self.step = 0
        self.whole: set[int] = set()
        self.unsure = 0
        self.start()

    def teardown(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Open the folder as a new process does."""
        self.node: Checkpointer = checkpointer(self.folder, {"memory": self.memory}, keep=2, staging=Blocking())

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        """Save a checkpoint some steps later."""
        self.step += ahead
        self.memory.state = state_of(self.step)
        self.node.save(Step(self.step, 10**6))
        self.whole.add(self.step)
        self.unsure = 0

    @rule(number=st.integers(1, 25), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def save_with_an_error(self, number: int, code: int) -> None:
        """Let one system call of a save fail. If it was the last call, the checkpoint is committed anyway."""
        self.step += 1
        self.memory.state = state_of(self.step)
        try:
            with watch_calls(FailAt(number, code)):
                self.node.save(Step(self.step, 10**6))
        except UserError:
            if not (self.folder / f"checkpoints/step-{self.step}").exists():
                return
        self.unsure += 1
        self.whole.add(self.step)

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), how=st.sampled_from([_flip, _cut, None]))
    def corrupt(self, data: st.DataObject, how: Callable[[Path, random.Random], None] | None) -> None:
        """Change or remove a checkpoint file."""
        steps = sorted(step for step in self.whole if (self.folder / f"checkpoints/step-{step}").exists())
        if not steps:
            return
        checkpoint = self.folder / f"checkpoints/step-{data.draw(st.sampled_from(steps))}"
        path = checkpoint / data.draw(st.sampled_from(sorted(os.listdir(checkpoint))))
        before = path.read_bytes()
        if how is None:
            path.unlink()
        else:
            how(path, random.Random(data.draw(st.integers(0, 99))))
        if not path.exists() or path.read_bytes() != before:
            self.whole.discard(int(checkpoint.name.removeprefix("step-")))

    @rule()
    def restart(self) -> None:
        """Restart, and restore the newest valid checkpoint."""
        steps = {step for step in self.whole if (self.folder / f"checkpoints/step-{step}").exists()}
        names = list((self.folder / "checkpoints").glob("step-*"))
        self.start()
        try:
            restored = self.node.restore()
        except UserError as error:
            assert not steps and names, error
            for path in names:
                shutil.rmtree(path)
            restored = 0
        else:
            assert restored == max(steps, default=0)
        if restored:
            expected = state_of(restored)
            assert torch.equal(self.memory.state.pop("weight"), expected.pop("weight"))
            assert self.memory.state == expected
        self.step = max(self.step, restored)

    @invariant()
    def nothing_is_left_over(self) -> None:
        """Check that retention leaves no more checkpoints than allowed, apart from corrupt ones and failed saves."""
        steps = [step for step in self.whole if (self.folder / f"checkpoints/step-{step}").exists()]
        assert len(steps) <= 3 + self.unsure


@pytest.mark.parametrize("times", [15, pytest.param(150, marks=pytest.mark.soak)])
def test_any_sequence_of_faults_restores_the_newest_valid_checkpoint(times: int) -> None:
    """Any sequence of saves, full disks, corruption and restarts restores the newest valid checkpoint."""
    run_state_machine_as_test(
        Folder, settings=settings(max_examples=times, stateful_step_count=15, suppress_health_check=list(HealthCheck))
    )


def _expire_or_read(folder: Path, seconds: float) -> int:
    """Save on rank 0 and read the newest checkpoint on rank 1, until time is over, and often; return how often."""
    end, times = time.monotonic() + seconds, 0
    memory = StateNode()
    node = checkpointer(folder, {"memory": memory}, keep=1) if os.environ["RANK"] == "0" else None
    while time.monotonic() < end or times <= 10:
        times += 1
        if node is not None:
            memory.state = {"weight": torch.full((100_000,), float(times))}
            node.save(Step(times, 10**9))
        elif (path := find_newest_valid_checkpoint(folder)) is not None:
            try:
                weight = load_node_state(path, "memory")["weight"]
            except UserError:
                if path.exists():
                    raise
                continue  # it was expired after newest() returned it
            if weight.unique().numel() != 1 or weight[0].item() != int(path.name.removeprefix("step-")):
                raise ValueError(f"{path} holds {weight.unique()}")
    return times


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.soak)])
def test_a_reader_during_saves_sees_valid_checkpoints(tmp_path: Path, seconds: float) -> None:
    """A reader never sees a partly removed checkpoint."""
    saved, read = run_ranks(_expire_or_read, 2, tmp_path, seconds, timeout=seconds + 60)
    assert saved > 10 and read > 10


def _endure(folder: Path, steps: int, every: int) -> tuple[list[int], list[int]]:
    """Run long with faults, and return open files, threads and peak memory early and at the end."""
    moments = random.Random(1)
    weight = torch.zeros(20_000)
    memory = StateNode({"weight": weight, "step": 0})
    node = checkpointer(folder, {"memory": memory}, every=every, keep=2, staging=Blocking(), failures=10**9)
    seen: list[list[int]] = []
    for index in range(1, steps):
        weight.fill_(index)
        memory.state["step"] = index
        if moments.random() < 0.1 / every:
            with watch_calls(FailAt(moments.randrange(1, 30), errno.ENOSPC)):
                node.run_phase(Step(index, steps))
                node._saves.wait_for_pending_save()
        else:
            node.run_phase(Step(index, steps))
        node.wait_until_staged()
        if index % (steps // 10) == 0:
            memory_used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seen.append([len(os.listdir("/proc/self/fd")), threading.active_count(), memory_used])
    node.run_phase(Step(steps, steps))
    return seen[1], seen[-1]


@pytest.mark.parametrize(("steps", "every"), [(300, 5), pytest.param(10_000, 20, marks=pytest.mark.soak)])
def test_long_run_leaks_nothing(tmp_path: Path, steps: int, every: int) -> None:
    """Hundreds of saves, some with errors, leak no file, thread or memory."""
    [(early, late)] = run_ranks(_endure, 1, tmp_path, steps, every, timeout=500)
    assert late[0] <= early[0] + 3 and late[1] <= early[1] + 3  # a save may be under way
    assert late[2] - early[2] < 8_000  # KiB
    memory = StateNode()
    assert checkpointer(tmp_path, {"memory": memory}).restore() == steps
    assert memory.state["step"] == steps - 1 and set(memory.state["weight"].tolist()) == {steps - 1}


def test_files_of_another_run_are_detected(tmp_path: Path) -> None:
    """A manifest or a file from another run with the same step and sizes is detected."""
    for run, factor in (("a", 1.0), ("b", 2.0)):
        checkpointer(tmp_path / run, {"memory": StateNode({"w": torch.ones(5) * factor})}).save(Step(3, 9))
    ours, theirs = (tmp_path / run / "checkpoints/step-3" for run in ("a", "b"))
    for name in ("manifest.json", "rank-0.safetensors"):
        good = (ours / name).read_bytes()
        shutil.copy(theirs / name, ours / name)
        with pytest.raises(CorruptCheckpointError, match=r"rank-0\.safetensors has a checksum mismatch"):
            verify_checkpoint(ours)
        (ours / name).write_bytes(good)
