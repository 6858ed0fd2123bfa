"""`drawloom launch` in real processes: what is printed of a failure, and the scripts of docs/clusters.md."""

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

from drawloom.components.checkpoint.manifest import list_checkpoints, step_of
from support.blocks import blocks
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
def place(tmp_path: Path) -> Path:
    """A folder with a corpus, the tiny recipe, and `recipe.toml`, which runs until it is stopped."""
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    return tmp_path


def _environment(place: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    return {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": path, **more}


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("optimizer.lr=-1", 2, "command line: [optimizer] lr: -1.0 is not above 0 (DL303)"),
        ("corpus.paths=['nothing/*']", 2, 'no file matches "nothing/*"'),
    ],
    ids=["recipe", "run"],
)
def test_a_failure_of_every_process_is_one_message(place: Path, word: str, code: int, message: str) -> None:
    """Of the recipe or of the run: nothing else is printed, and the exit code is that of a single process."""
    words = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", "2", "run", "recipe.toml", word]
    done = subprocess.run(words, cwd=place, env=_environment(place), capture_output=True, text=True, timeout=120)
    [line] = [line for line in done.stderr.splitlines() if "warning: " not in line]
    assert message in line and done.stdout == "" and done.returncode == code


def _put_commands(place: Path, words: Sequence[str], processes: int, **texts: str) -> None:
    """Write the commands that a script calls into a folder of programs."""
    (place / "bin").mkdir()
    drawloom = DRAWLOOM.format(python=sys.executable, processes=processes, words=shlex.join(words))
    for name, text in {"drawloom": drawloom, **texts}.items():
        (place / "bin" / name).write_text(text, "utf-8")
        (place / "bin" / name).chmod(0o755)


@contextmanager
def _started(command: Sequence[str], place: Path, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command, whose output goes to the file `printed`, and kill all that it started if it fails to end."""
    with (place / "printed").open("wb") as printed:
        files: Mapping[str, Any] = {"stdout": printed, "stderr": printed}
        environment = _environment(place, **more)
        with subprocess.Popen(command, cwd=place, env=environment, start_new_session=True, **files) as process:
            try:
                yield process
            finally:
                for pid in _descendants(process.pid):
                    os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """A process and all that it has started, and these, as long as their parents live."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return [*([pid] if path.exists() else []), *(each for child in children for each in _descendants(int(child)))]


def _wait_for_step(place: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    path = place / "runs/tiny/metrics.jsonl"
    end = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert time.monotonic() < end and process.poll() is None, (place / "printed").read_text("utf-8")
        time.sleep(0.02)


def _assert_stopped(place: Path, process: "subprocess.Popen[bytes]") -> None:
    """The script ends with SIGTERM's exit code when all of its processes have, and the last step is committed."""
    processes = _descendants(process.pid)
    assert process.wait(timeout=100) == 143
    printed = (place / "printed").read_text("utf-8")
    left = [pid for pid in processes if _is_running(pid)]
    assert not left, printed
    saved = [step_of(path) for path in list_checkpoints(place / "runs/tiny/checkpoints")]
    assert saved == [rows(place / "runs/tiny")[-1]["step"]]
    assert printed.count("stopped by SIGTERM") == 1 and "Traceback (most recent call last)" not in printed


def _is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may not have been reaped yet, and has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def _slurm_script() -> str:
    """The documented script, whose machines meet at a free port."""
    script = next(block.text for block in blocks(CLUSTERS) if "#SBATCH" in block.text)
    with socket.create_server(("127.0.0.1", 0)) as server:
        return script.replace("29500", str(server.getsockname()[1]))


def test_the_slurm_script_saves_a_checkpoint_at_sigterm(place: Path) -> None:
    """The batch shell alone gets the signal: it forwards it to the steps of two nodes, and waits for them."""
    hosts = "#!/bin/bash\necho 127.0.0.1\n"
    _put_commands(place, [], 1, srun=SRUN, scancel=SCANCEL, scontrol=hosts)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    with _started(["bash", "-c", _slurm_script()], place, **variables) as process:
        _wait_for_step(place, 3, process)
        process.terminate()
        _assert_stopped(place, process)


def _pod() -> list[str]:
    """The documented command of a container, whose run folder is one of the test."""
    pod = next(yaml.safe_load(block.text) for block in blocks(CLUSTERS) if "restartPolicy" in block.text)
    [container] = pod["spec"]["containers"]
    return [word.replace("/runs/one", "runs/tiny") for word in [*container["command"], *container["args"]]]


def test_the_command_of_a_pod_saves_a_checkpoint_at_sigterm(place: Path) -> None:
    """Its first process, the launcher, gets the signal."""
    _put_commands(place, [], 2)
    with _started(_pod(), place) as process:
        _wait_for_step(place, 3, process)
        process.terminate()
        _assert_stopped(place, process)


@pytest.mark.soak
def test_a_launcher_waits_longer_than_torchrun(place: Path) -> None:
    """A step or a save that ends 33 s after SIGTERM, and within `stop.grace`, is not lost."""
    (place / "slow.py").write_text(SLOW, "utf-8")
    (place / "recipe.toml").write_text(RECIPE + SLOW_PHASE, "utf-8")
    _put_commands(place, ["--import=slow.py"], 2)
    with _started(_pod(), place) as process:
        _wait_for_step(place, 2, process)
        time.sleep(1.0)  # until step 3 has begun to sleep
        process.terminate()
        _assert_stopped(place, process)
