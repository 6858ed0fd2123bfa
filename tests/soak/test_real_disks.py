"""Full and read-only disks, if this process may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drawloom.components.checkpoint.restore import read_newest_valid
from drawloom.components.checkpoint.saves import Retention
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import StateNode, checkpointer, restore_step, state_of
from support.power import is_possible
from support.runs import drawloom, write_corpus


@contextmanager
def _small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


if is_possible():

    @pytest.mark.parametrize("staging", [False, True])
    def test_full_disk_skips_checkpoints_until_there_is_space(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, staging: bool
    ) -> None:
        """
        Checkpoints that do not fit are skipped with a warning and leave no files; committed checkpoints are kept, and
        the first checkpoint after space is freed is committed.
        """
        with _small_disk(tmp_path, 1000) as disk:
            memory = StateNode({"weight": torch.zeros(100_000)})  # 400 kB: only two fit
            stager = Blocking() if staging else None
            node = checkpointer(disk, {"memory": memory}, every=1, keep=9, staging=stager, failures=9)
            (disk / "other").write_bytes(bytes(100_000))
            for index in range(1, 6):
                memory.state["weight"].fill_(index)
                node.run_phase(Step(index, 99))
            node._saves.wait_for_pending_save()
            left = sorted(path.name for path in (disk / "checkpoints").iterdir())
            assert left == ["step-1", "step-2"]
            messages = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
            assert [message.split()[1] for message in messages] == ["3", "4", "5"]
            for message in messages:
                assert "skipped: disk full: needs 400.0 kB, " in message and f" free in {disk}/checkpoints (" in message
                assert "rank-0.safetensors: No space left on device)" in message
            (disk / "other").unlink()
            for path in (disk / "checkpoints/step-1").iterdir():
                path.unlink()
            os.rmdir(disk / "checkpoints/step-1")
            memory.state["weight"].fill_(6)
            node.save(Step(6, 99))
            fresh = StateNode()
            retention = Retention(keep=3)
            checkpoint = read_newest_valid(SingleProcess(), disk / "checkpoints", [5, 6], {"memory": fresh}, retention)
            assert checkpoint.manifest.step == 6
            assert set(checkpoint.states["memory"]["weight"].tolist()) == {6.0}

    @pytest.mark.parametrize("staging", [False, True])
    def test_disk_that_turns_read_only_fails_only_saves(tmp_path: Path, staging: bool) -> None:
        """On a disk that turned read-only, saves raise with the reason, and committed steps are restored."""
        with _small_disk(tmp_path, 1000) as disk:
            memory = StateNode(state_of(1))
            node = checkpointer(disk, {"memory": memory}, staging=Blocking() if staging else None)
            node.save(Step(1, 99))
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            memory.state = state_of(2)
            with pytest.raises(UserError, match=r"checkpoint after step 2 failed: .*Read-only file system"):
                node.save(Step(2, 99))
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            assert restore_step(disk) == 1
            node.save(Step(2, 99))
            assert restore_step(disk) == 2

    def test_run_in_read_only_folder_is_rejected(tmp_path: Path) -> None:
        """The error names the folder and the reason, before anything is computed."""
        (tmp_path / "disk").mkdir()
        write_corpus(tmp_path)
        with _small_disk(tmp_path / "disk", 1000) as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            [outcome] = drawloom(tmp_path, "run", "tiny.toml", f"run.folder={disk}/run")
        assert outcome.code == 1 and f"{disk}/run" in outcome.text and "Read-only file system" in outcome.text
        assert "Traceback" not in outcome.text
