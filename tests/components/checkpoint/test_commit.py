"""What a crash, at any system call of a save, leaves behind."""

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
from support.checkpoints import Memory, checkpointer, restored, save_steps, state_of
from support.crashes import LOST, Remains, cut_everywhere, kill_everywhere
from support.disk import Call, FailAt, watched
from support.processes import run_ranks


def _bad(found: list[Remains]) -> list[Remains]:
    """Where a committed step was lost, or something that is not whole had the name of a step."""
    return [each for each in found if each.restored < each.committed or each.torn]


@pytest.mark.parametrize("staging", [False, True])
def test_a_kill_at_any_call_loses_no_committed_step(tmp_path: Path, staging: bool) -> None:
    """At each call of two saves with rotation a process is killed: what was committed is found, and no less."""
    [found] = run_ranks(kill_everywhere, 1, tmp_path, staging)
    steps = [each.restored for each in found]
    assert len(steps) > 40
    assert not _bad(found)
    assert steps == sorted(steps)  # once a step was committed, no later kill takes it back
    assert {*steps} == {2, 3, 4}
    assert all(steps.count(step) > 10 for step in (2, 3))
    for each in found:
        assert all(name.startswith("step-") for name in each.left)  # the next start swept the rest
        assert 2 <= len(each.left) <= 3


def test_a_power_cut_at_any_call_loses_no_committed_step(tmp_path: Path) -> None:
    """
    After each call of two saves with rotation the power is cut: whatever was not fsynced is gone, names too, and what
    was committed is found all the same.
    """
    [found] = run_ranks(cut_everywhere, 1, tmp_path)
    assert len(found) > 60
    assert not _bad(found)
    assert {each.restored for each in found} == {2, 3, 4}


@pytest.mark.parametrize("mutation", ["no_rename", "rotate_before_commit"])
def test_kills_find_what_is_in_the_wrong_order(tmp_path: Path, mutation: str) -> None:
    """Writing in place, and making room too early, are found: the test above is no matter of course."""
    [found] = run_ranks(kill_everywhere, 1, tmp_path, False, mutation)
    assert _bad(found)


@pytest.mark.parametrize(
    "mutation", ["no_fsync", "no_fsync_of_folders", "manifest_first", "rotate_before_commit", "no_rename"]
)
def test_power_cuts_find_what_is_not_made_to_last(tmp_path: Path, mutation: str) -> None:
    """No fsync at all, none of folders, or one too late: each loses a step, which no kill would show."""
    [found] = run_ranks(cut_everywhere, 1, tmp_path, mutation)
    assert _bad(found)


def test_a_kill_does_not_show_that_nothing_is_made_to_last(tmp_path: Path) -> None:
    """Which is why power cuts are tried too."""
    [found] = run_ranks(kill_everywhere, 1, tmp_path, False, "no_fsync")
    assert not _bad(found)


def test_every_byte_is_on_the_disk_before_it_is_relied_on(tmp_path: Path) -> None:
    """
    Each file is fsynced after its last write, the folder after its last file, and both before the rename; the parent
    after the rename and before anything older is removed.
    """
    save_steps(tmp_path, 1)
    order: list[tuple[str, str]] = []

    def seen(call: Call) -> None:
        order.append((call.name, os.path.relpath(call.path, tmp_path / "checkpoints")))

    with watched(seen):
        save_steps(tmp_path, 2, keep=1)
    aside, renamed = ".tmp-step-2", order.index(("rename", ".tmp-step-2"))
    written = {path for name, path in order[:renamed] if name == "open" and path.startswith(aside)}
    assert len(written) == 4
    for path in written:
        calls = [name for name, each in order[:renamed] if each == path]
        assert (calls[0], {*calls[1:-1]}, calls[-1]) == ("open", {"pwrite"}, "fsync")
    opened = [path for name, path in order[:renamed] if name == "open"]
    assert opened[-1] == f"{aside}/manifest.json"
    assert order[renamed - 1] == ("fsync", aside)
    assert order[renamed + 1] == ("fsync", ".")
    assert order[renamed + 2] == ("rename", "step-1")
    assert order[renamed + 3] == ("fsync", ".")
    assert not [name for name, _ in order[: renamed + 4] if name in ("unlink", "rmdir")]


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
def test_a_failing_call_is_a_step_that_is_not_committed(tmp_path: Path, code: int, staging: bool) -> None:
    """
    At each call of a save the disk fails once: an error with the path, and before the rename no step and no rest. The
    same file is never fsynced again.
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
        assert ("disk full: needs 48 bytes, " in error) == (code != errno.EIO)
        committed.append((folder / "checkpoints" / "step-3").exists())
        assert restored(folder) == (3 if committed[-1] else 2)
        assert len(os.listdir(folder / "checkpoints")) == (3 if committed[-1] else 2)
    assert committed == [False] * (len(committed) - 1) + [True]  # the last call makes the new name last
    assert len(committed) > 12


def test_a_failing_call_of_any_thread_is_a_step_that_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large state is written by several threads: a full disk for one of them is never taken for success."""
    monkeypatch.setattr(commit, "SHARD", 100)
    state = {f"weight {number}": torch.full((20,), float(number)) for number in range(4)}
    for number in range(1, 100):
        folder = tmp_path / f"run-{number}"
        save_steps(folder, 2)
        memory = Memory(state)
        node, fault = checkpointer(folder, {"memory": memory}), FailAt(number, errno.ENOSPC)
        with watched(fault), suppress(UserError):
            node.save(Step(3, 3))
        if fault.hit is None:
            break
        names = os.listdir(folder / "checkpoints")
        assert names == ["step-2"] or (number > 18 and sorted(names) == ["step-2", "step-3"])
    assert number > 18
    files = sorted(path.name for path in (folder / "checkpoints/step-3").glob("*.safetensors"))
    assert files == ["rank-0-1.safetensors", "rank-0-2.safetensors", "rank-0-3.safetensors", "rank-0.safetensors"]


def _fail_once(folder: Path, number: int, code: int, staging: bool) -> tuple[str, FailAt]:
    """Save step 3 with one failing call; the words of the error, and whether there was such a call."""
    node = checkpointer(folder, {"memory": Memory(state_of(3))}, staging=Blocking() if staging else None)
    fault, synced = FailAt(number, code), list[str]()

    def seen(call: Call) -> None:
        if call.name == "fsync":
            if call.path in synced:
                raise RuntimeError(f"{call.path} was fsynced a second time")
            synced.append(call.path)
        fault(call)

    try:
        with watched(seen):
            node.save(Step(3, 3))
    except UserError as error:
        return str(error), fault
    return "", fault


def _sweep_everywhere(base: Path) -> list[int]:
    """A start that sweeps, killed at each of its calls in turn; what is restored by the next start."""
    save_steps(base / "good", 1, 2)
    for name in (".tmp-step-3", ".trash-step-0"):
        shutil.copytree(base / "good/checkpoints/step-1", base / "good/checkpoints" / name)
    found: list[int] = []
    while True:
        folder = base / "run"
        shutil.copytree(base / "good", folder)
        child = os.fork()
        if child == 0:
            count = 0

            def seen(_call: Call) -> None:
                nonlocal count
                count += 1
                if count == len(found) + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            with watched(seen):
                checkpointer(folder, {})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(restored(folder))
        if sorted(os.listdir(folder / "checkpoints")) != ["step-1", "step-2"]:
            found.append(LOST)
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            return found


def test_a_kill_while_sweeping_is_made_up_for_by_the_next_start(tmp_path: Path) -> None:
    """At each call; nothing of the rest is left in the end, and nothing else is gone."""
    [found] = run_ranks(_sweep_everywhere, 1, tmp_path)
    assert len(found) > 8
    assert set(found) == {2}
