"""The SLURM script of a sweep."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from drawloom.components.commands.training.sweep import format_array_script

SAVE = "trap 'sleep 0.2; echo saved; exit 143' TERM; echo ready; for _ in $(seq 100); do sleep 0.1; done"


def test_a_task_runs_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index chooses the command, words with spaces stay whole, and the exit code is the command's."""
    monkeypatch.chdir(tmp_path)
    commands = [["touch", "a b"], ["bash", "-c", "pwd; exit 3"]]
    script = format_array_script("my sweep", commands, Path("my runs"), max_parallel_tasks=4, options=["--gres=gpu:1"])
    lines = script.splitlines()
    assert {"#SBATCH --array=0-1%4", "#SBATCH --gres=gpu:1", "#SBATCH --job-name=my_sweep"} <= set(lines)
    assert f"#SBATCH --output='{tmp_path}/my runs/slurm-%A_%a.txt'" in lines
    done = [
        subprocess.run(["bash", "-c", script], env={**os.environ, "SLURM_ARRAY_TASK_ID": index}, capture_output=True)
        for index in "01"
    ]
    assert (tmp_path / "a b").exists() and [task.returncode for task in done] == [0, 3]
    assert done[1].stdout.decode().strip() == str(tmp_path)


def test_a_signal_waits_for_the_run_to_save(tmp_path: Path) -> None:
    """SIGTERM for the script goes to the run, whose exit code is the task's."""
    script = format_array_script("s", [["bash", "-c", SAVE]], tmp_path, max_parallel_tasks=None, options=[])
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    task = subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None and task.stdout.readline() == "ready\n"
    time.sleep(0.1)
    task.send_signal(signal.SIGTERM)
    assert task.communicate(timeout=20)[0] == "saved\n" and task.returncode == 143
