"""Crashes at any system call of a save."""

import errno
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import StateNode, checkpointer, restore_step, save_steps, state_of
from support.crashes import LOST, Remains, cut_everywhere, kill_everywhere
from support.disk import Call, FailAt, watch_calls
from support.processes import run_ranks


def _bad(outcomes: list[Remains]) -> list[Remains]:
    """Return the crashes that lost a committed step, or left an incomplete folder with a step's name."""
    return [remains for remains in outcomes if remains.restored < remains.committed or remains.torn]


@pytest.mark.parametrize("staging", [False, True])
def test_a_kill_at_any_call_loses_no_committed_step(tmp_path: Path, staging: bool) -> None:
    """A process is killed at every call in two saves with retention: every committed step is restored."""
    [outcomes] = run_ranks(kill_everywhere, 1, tmp_path, staging, timeout=180)
    steps = [remains.restored for remains in outcomes]
    assert len(steps) > 40
    assert not _bad(outcomes)
    assert steps == sorted(steps)  # once a step was committed, no later kill takes it back
    assert {*steps} == {2, 3, 4}
    assert all(steps.count(step) > 10 for step in (2, 3))
    for remains in outcomes:
        assert all(name.startswith("step-") for name in remains.left)  # the next start swept the rest
        assert 2 <= len(remains.left) <= 3


def test_a_power_cut_at_any_call_loses_no_committed_step(tmp_path: Path) -> None:
    """
    The power is cut after each call in two saves with retention: everything not fsynced is lost, names too; every
    committed step is restored.
    """
    [outcomes] = run_ranks(cut_everywhere, 1, tmp_path)
    assert len(outcomes) > 60
    assert not _bad(outcomes)
    assert {remains.restored for remains in outcomes} == {2, 3, 4}


@pytest.mark.soak
@pytest.mark.parametrize("mutation", ["no_rename", "expire_before_commit"])
def test_the_kill_test_finds_wrong_orders(tmp_path: Path, mutation: str) -> None:
    """Writing in place and expiring before the commit are found: the test above can fail."""
    [outcomes] = run_ranks(kill_everywhere, 1, tmp_path, False, mutation)
    assert _bad(outcomes)


@pytest.mark.soak
@pytest.mark.parametrize(
    "mutation", ["no_fsync", "no_fsync_of_folders", "manifest_first", "expire_before_commit", "no_rename"]
)
def test_the_power_cut_test_finds_missing_fsyncs(tmp_path: Path, mutation: str) -> None:
    """Without fsync, without fsync on folders, or with one too late, a power cut loses a step; no kill shows it."""
    [outcomes] = run_ranks(cut_everywhere, 1, tmp_path, mutation)
    assert _bad(outcomes)


@pytest.mark.soak
def test_the_kill_test_does_not_find_missing_fsyncs(tmp_path: Path) -> None:
    """The page cache survives a kill: only power cuts test fsync."""
    [outcomes] = run_ranks(kill_everywhere, 1, tmp_path, False, "no_fsync")
    assert not _bad(outcomes)


def test_every_byte_is_on_disk_before_the_next_depends_on_it(tmp_path: Path) -> None:
    """
    Each file is fsynced after its last write, the folder after its last file, and both before the rename; the parent
    after the rename and before anything older is removed.
    """
    save_steps(tmp_path, 1)
    order: list[tuple[str, str]] = []

    def seen(call: Call) -> None:
        order.append((call.name, os.path.relpath(call.path, tmp_path / "checkpoints")))

    with watch_calls(seen):
        save_steps(tmp_path, 2, keep=1)
    temp, renamed = ".tmp-step-2", order.index(("rename", ".tmp-step-2"))
    written = {path for name, path in order[:renamed] if name == "open" and path.startswith(temp)}
    assert len(written) == 4
    for path in written:
        calls = [name for name, target in order[:renamed] if target == path]
        assert (calls[0], {*calls[1:-1]}, calls[-1]) == ("open", {"pwrite"}, "fsync")
    opened = [path for name, path in order[:renamed] if name == "open"]
    assert opened[-1] == f"{temp}/manifest.json"
    assert order[renamed - 1] == ("fsync", temp)
    assert order[renamed + 1] == ("fsync", ".")
    assert order[renamed + 2] == ("rename", "step-1")
    assert order[renamed + 3] == ("fsync", ".")
    assert not [name for name, _ in order[: renamed + 4] if name in ("unlink", "rmdir")]


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
def test_a_failing_call_commits_nothing(tmp_path: Path, code: int, staging: bool) -> None:
    """
    The disk fails once at each call in a save: the error has the path, and before the rename there is neither a step
    nor a leftover. The same file is never fsynced again: Linux may report success for lost pages.
    """
    save_steps(tmp_path / "good", 1, 2)
    committed: list[bool] = []
    for number in range(1, 100):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "good", folder)
        error, fault = _fail_once(folder, number, code, staging)
        if fault.hit is None:
            break
        assert f"{folder}/checkpoints" in error
        assert os.strerror(code) in error
        assert ("disk full: needs 48 bytes, " in error) == (code not in (errno.EIO, errno.EFBIG))
        committed.append((folder / "checkpoints" / "step-3").exists())
        assert restore_step(folder) == (3 if committed[-1] else 2)
        assert len(os.listdir(folder / "checkpoints")) == (3 if committed[-1] else 2)
    assert committed == [False] * (len(committed) - 1) + [True]  # the last call makes the new name last
    assert len(committed) > 12


def test_a_failing_call_of_any_thread_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state is written by several threads: a full disk in one of them fails the save."""
    monkeypatch.setattr(commit, "SHARD", 100)
    state = {f"weight {number}": torch.full((20,), float(number)) for number in range(4)}
    for number in range(1, 100):
        folder = tmp_path / f"run-{number}"
        save_steps(folder, 2)
        memory = StateNode(state)
        node, fault = checkpointer(folder, {"memory": memory}), FailAt(number, errno.ENOSPC)
        with watch_calls(fault), suppress(UserError):
            node.save(Step(3, 3))
        if fault.hit is None:
            break
        names = os.listdir(folder / "checkpoints")
        assert names == ["step-2"] or (number > 18 and sorted(names) == ["step-2", "step-3"])
    assert number > 18
    files = sorted(path.name for path in (folder / "checkpoints/step-3").glob("*.safetensors"))
    assert files == ["rank-0-1.safetensors", "rank-0-2.safetensors", "rank-0-3.safetensors", "rank-0.safetensors"]


def _fail_once(folder: Path, number: int, code: int, staging: bool) -> tuple[str, FailAt]:
    """Save step 3 with one failing call; the error's text, and whether the call happened."""
    node = checkpointer(folder, {"memory": StateNode(state_of(3))}, staging=Blocking() if staging else None)
    fault, synced = FailAt(number, code), list[str]()

    def seen(call: Call) -> None:
        if call.name == "fsync":
            if call.path in synced:
                raise RuntimeError(f"{call.path} was fsynced a second time")
            synced.append(call.path)
        fault(call)

    try:
        with watch_calls(seen):
            node.save(Step(3, 3))
    except UserError as error:
        return str(error), fault
    return "", fault


def _kill_cleanup_everywhere(base: Path) -> list[int]:
    """
    Kill a start while it removes leftovers, at one call after another; return the steps restored by the next start.
    """
    save_steps(base / "good", 1, 2)
    for name in (".tmp-step-3", ".trash-step-0"):
        shutil.copytree(base / "good/checkpoints/step-1", base / "good/checkpoints" / name)
    restored_steps: list[int] = []
    while True:
        folder = base / "run"
        shutil.copytree(base / "good", folder)
        child = os.fork()
        if child == 0:
            count = 0

            def seen(_call: Call) -> None:
                nonlocal count
                count += 1
                if count == len(restored_steps) + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            with watch_calls(seen):
                checkpointer(folder, {})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        restored_steps.append(restore_step(folder))
        if sorted(os.listdir(folder / "checkpoints")) != ["step-1", "step-2"]:
            restored_steps.append(LOST)
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            return restored_steps


def test_a_kill_during_cleanup_is_repaired_by_the_next_start(tmp_path: Path) -> None:
    """After a kill at every call, no leftovers remain in the end, and nothing else is removed."""
    [restored_steps] = run_ranks(_kill_cleanup_everywhere, 1, tmp_path)
    assert len(restored_steps) > 8
    assert set(restored_steps) == {2}
