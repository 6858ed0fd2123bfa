"""`drawloom launch` in real processes: output of failures, and the scripts of docs/clusters.md."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from support.blocks import blocks
from support.forked_children import fork_children
from support.processes import run_ranks
from support.runs import SOURCE, rows, write_corpus

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters.md"

DRAWLOOM = """#!/bin/bash
# The command, of which the documented 8 processes of each machine are {processes}
exec {python} -m drawloom "${{@/#8/{processes}}}" {words}
"""

SRUN = """#!/bin/bash
# Starts a task for each node, in a session of its own as slurmstepd does, and kills the tasks at SIGTERM as srun does
shift
trap 'kill -KILL $(cat tasks)' TERM
for node in $(seq "$SLURM_NNODES"); do setsid "$@" & echo $! >> tasks; done
code=0
for task in $(cat tasks); do wait "$task" || code=$?; done
exit $code
"""

SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat tasks)
"""

RECIPE = """
extends = "tiny.toml"

[trainer]
steps = 1000000
on_finish = []

[batch]
micro_size = 2

[evaluate]
every = "never"

[checkpoint]
every = "last"
"""

SLOW = '''
import time

from drawloom import component


@component(impact="safe")
class Slow:
    """A phase that takes longer in step 3 than torchrun waits for."""

    def run_phase(self, step):
        time.sleep(33.0 * (step.index == 3))
'''


SLOW_PHASE = """
[slow]
use = "slow"

[edit.trainer.phases]
before."@report" = ["@slow"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus, the tiny recipe, and `recipe.toml`, which runs until it is stopped."""
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    return tmp_path


def _environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": path, **more}


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("optimizer.lr=-1", 2, "command line: [optimizer] lr: -1.0 is not above 0 (DL303)"),
        ("corpus.paths=['nothing/*']", 2, 'no file matches "nothing/*"'),
    ],
    ids=["recipe", "run"],
)
def test_a_failure_of_every_process_is_one_message(folder: Path, word: str, code: int, message: str) -> None:
    """An error in the recipe or the run is printed once and starts nothing again, with a single process's exit code."""
    words = ["launch", "--nproc-per-node", "2", "--max-restarts", "2", "run", "recipe.toml", word]
    done = run_ranks(_run_forked, 1, folder, words, timeout=120, variables=False)[0]
    [line] = [line for line in done.stderr.splitlines() if "warning: " not in line]
    assert message in line and done.stdout == "" and done.returncode == code


def _run_forked(folder: Path, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run `drawloom` in a fork of this process, and its children in forks of that one."""
    fork_children()
    command = [sys.executable, "-m", "drawloom", *words]
    return subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=100)


def test_processes_that_were_all_killed_start_again(folder: Path) -> None:
    """The store of the launcher keeps the addresses of the killed ones, to which the new ones do not connect."""
    run_ranks(_kill_all_and_wait_for_others, 1, folder, timeout=300, variables=False)


def _kill_all_and_wait_for_others(folder: Path) -> None:
    fork_children()
    launch = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", "2", "--max-restarts", "1"]
    with _start([*launch, "run", "recipe.toml"], folder) as process:
        _wait_for_first_steps(folder, 1, process)
        for pid in _list_descendants(process.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        _wait_for_first_steps(folder, 2, process)
        process.terminate()
        assert process.wait(timeout=100) == 143, (folder / "printed").read_text("utf-8")


def _wait_for_first_steps(folder: Path, times: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until step 1 has been printed this many times; a kill between its row and its line would lose the line."""
    end = time.monotonic() + 100
    while (text := (folder / "printed").read_text("utf-8")).count("\nstep 1/") < times:
        assert time.monotonic() < end and process.poll() is None, text
        time.sleep(0.02)


@pytest.mark.soak
def test_a_machine_that_has_lost_all_workers_starts_them_again_alone(folder: Path) -> None:
    """The other machine's process goes on meanwhile, and is joined by the new one; both launchers stop with the run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words = [*options, "run", "recipe.toml", "processes.on_failure=continue", "batch.global_size=4"]
    (folder / "second").mkdir()
    with (
        _start([sys.executable, "-m", "drawloom", "launch", *words], folder) as first,
        _start([sys.executable, "-m", "drawloom", "launch", *words], folder, printed="second/printed") as second,
    ):
        _wait_for_step(folder, 3, first)
        workers = [_list_descendants(launcher.pid)[1] for launcher in (first, second)]
        [lost] = [pid for pid in workers if "RANK=1" in Path(f"/proc/{pid}/environ").read_text("utf-8").split("\0")]
        os.kill(lost, signal.SIGKILL)
        end = time.monotonic() + 100
        while "1 process joins" not in (text := _read_both(folder)):
            assert time.monotonic() < end and first.poll() is second.poll() is None, text
            time.sleep(0.02)
        assert "1 of 2 processes continue" in text and _is_running(*{*workers} - {lost})
        for launcher in (first, second):
            launcher.terminate()
        assert [launcher.wait(timeout=100) for launcher in (first, second)] == [143, 143], _read_both(folder)


def _read_both(folder: Path) -> str:
    """Return what two launchers have printed."""
    return "".join((folder / name).read_text("utf-8") for name in ("printed", "second/printed"))


def _write_commands(folder: Path, words: Sequence[str], processes: int, **texts: str) -> None:
    """Write the commands that a script calls into `bin`."""
    (folder / "bin").mkdir()
    drawloom = DRAWLOOM.format(python=sys.executable, processes=processes, words=shlex.join(words))
    for name, text in {"drawloom": drawloom, **texts}.items():
        (folder / "bin" / name).write_text(text, "utf-8")
        (folder / "bin" / name).chmod(0o755)


@contextmanager
def _start(
    command: Sequence[str], folder: Path, printed: str = "printed", **more: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command with its output in the file `printed`, and kill all its processes at the end."""
    with (folder / printed).open("wb") as file:
        files: Mapping[str, Any] = {"stdout": file, "stderr": file}
        environment = _environment(folder, **more)
        with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **files) as process:
            try:
                yield process
            finally:
                for pid in _list_descendants(process.pid):
                    os.kill(pid, signal.SIGKILL)


def _list_descendants(pid: int) -> list[int]:
    """List a process and its descendants with living parents."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return [
        *([pid] if path.exists() else []),
        *(descendant for child in children for descendant in _list_descendants(int(child))),
    ]


def _wait_for_step(folder: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    path = folder / "runs/tiny/metrics.jsonl"
    end = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert time.monotonic() < end and process.poll() is None, (folder / "printed").read_text("utf-8")
        time.sleep(0.02)


def _assert_stopped(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Assert that the script ends after its processes, with SIGTERM's exit code and the last step committed."""
    processes = _list_descendants(process.pid)
    assert process.wait(timeout=100) == 143
    printed = (folder / "printed").read_text("utf-8")
    left = [pid for pid in processes if _is_running(pid)]
    assert not left, printed
    saved = [step_of_checkpoint(path) for path in list_checkpoints(folder / "runs/tiny/checkpoints")]
    assert saved == [rows(folder / "runs/tiny")[-1]["step"]]
    assert printed.count("stopped by SIGTERM") == 1 and "Traceback (most recent call last)" not in printed


def _is_running(pid: int) -> bool:
    """Return whether a process runs; an ended process that was not reaped has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def _slurm_script() -> str:
    """Return the documented script with a free port."""
    script = next(block.text for block in blocks(CLUSTERS) if "#SBATCH" in block.text)
    with socket.create_server(("127.0.0.1", 0)) as server:
        return script.replace("29500", str(server.getsockname()[1]))


@pytest.mark.soak
def test_the_slurm_script_saves_a_checkpoint_at_sigterm(folder: Path) -> None:
    """The batch shell, which alone gets the signal, forwards it to the tasks of two nodes and waits for them."""
    hosts = "#!/bin/bash\necho 127.0.0.1\n"
    _write_commands(folder, [], 1, srun=SRUN, scancel=SCANCEL, scontrol=hosts)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    with _start(["bash", "-c", _slurm_script()], folder, **variables) as process:
        _wait_for_step(folder, 3, process)
        process.terminate()
        _assert_stopped(folder, process)


def _pod_command() -> list[str]:
    """Return the documented command of a container, with a run folder of the test."""
    job = next(yaml.safe_load(block.text) for block in blocks(CLUSTERS) if "terminationGracePeriod" in block.text)
    [container] = job["spec"]["template"]["spec"]["containers"]
    return [word.replace("/runs/one", "runs/tiny") for word in [*container["command"], *container["args"]]]


def test_the_command_of_a_pod_saves_a_checkpoint_at_sigterm(folder: Path) -> None:
    """The launcher, as the pod's first process, gets the signal and the run saves a checkpoint."""
    _write_commands(folder, [], 1)
    with _start(_pod_command(), folder) as process:
        _wait_for_step(folder, 3, process)
        process.terminate()
        _assert_stopped(folder, process)


@pytest.mark.soak
def test_a_launcher_waits_longer_than_torchrun(folder: Path) -> None:
    """A step that ends 33 s after SIGTERM, within `stop.grace`, is saved."""
    (folder / "slow.py").write_text(SLOW, "utf-8")
    (folder / "recipe.toml").write_text(RECIPE + SLOW_PHASE, "utf-8")
    _write_commands(folder, ["--import=slow.py"], 2)
    with _start(_pod_command(), folder) as process:
        _wait_for_step(folder, 2, process)
        time.sleep(1.0)  # until step 3 has begun to sleep
        process.terminate()
        _assert_stopped(folder, process)
