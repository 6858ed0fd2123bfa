"""Runs after the loss of processes: faults on single ranks, and comparison with an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generation import Generation
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.launch_store import connect_to_launch_store
from drawloom.components.distributed.membership import CURRENT, Spares
from drawloom.components.distributed.torchrun import SPARES, Launch, read_launch
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.phases.report import Report
from drawloom.components.run.signals import Signals
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, rows, write_corpus

RECIPE = """
extends = "tiny.toml"

[trainer]
steps = 8
on_finish = []

[batch]
global_size = 12
micro_size = 1

[evaluate]
every = "never"

[checkpoint]
every = "last"
"""

PLACES: dict[str, tuple[type, str]] = {
    "forward_backward": (ForwardBackward, "run_phase"),
    "report": (Report, "run_phase"),  # after the update
    "signals": (Signals, "agree_on_signal"),  # between steps
    "final tasks": (Signals, "raise_stopped_error_on_signal"),  # after the last step
    "join": (GroupFactory, "join"),  # from the second call on, while groups are made again
}


def _die_together() -> None:
    """Kill this process when two are here, and step 4 is committed: one that is late would see the other one's loss."""
    Path(f"dying-{os.getpid()}").touch()
    while len([*Path().glob("dying-*")]) < 2 or not Path("runs/tiny/checkpoints/step-4").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed together": _die_together,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck": lambda: time.sleep(60),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
}

Deaths = Mapping[int, tuple[str, int] | tuple[str, int, str]]


def write_recipe(folder: Path) -> Path:
    """Write a corpus and `recipe.toml`, and return the folder."""
    write_corpus(folder)
    (folder / "recipe.toml").write_text(RECIPE, "utf-8")
    return folder


def run_with_deaths(folder: Path, words: tuple[str, ...], deaths: Deaths, port: int, spares: int) -> Outcome:
    """
    Run a process, which gets a fault at the nth call of a place if `deaths` has its first rank; kills are usual.

    The last `spares` processes start when the others have begun, and faults wait until one of them waits.
    """
    if spares:
        _start_as_member_or_spare(spares)
    if port:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
    if (rank := int(os.environ["RANK"])) in deaths:
        place, step, *faults = deaths[rank]
        kind, name = PLACES[place]
        calls, method = [0], getattr(kind, name)

        def dying(self: Any, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == step:
                while spares and not _list_waiting_spares(read_launch()):  # it prepares itself for its machine's GPUs
                    time.sleep(0.1)
                FAULTS[faults[0] if faults else "killed"]()
            return method(self, *arguments)

        put(kind, name, dying)
    return command(folder, ("run", "recipe.toml", *words), None)


def _start_as_member_or_spare(spares: int) -> None:
    """Set a member's or a spare's variables, as `drawloom launch --spares` does; a spare waits for the run to begin."""
    ranks, rank = int(os.environ["WORLD_SIZE"]) - spares, int(os.environ["RANK"])
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), SPARES: str(spares)}
    if rank >= ranks:
        os.environ |= {"RANK": str(rank % ranks), "LOCAL_RANK": str(rank % ranks)}
        launch = read_launch()
        store = connect_to_launch_store(launch.address, launch.port, launch.attempt, 60.0)
        store.wait([CURRENT])


def survive(
    folder: Path, ranks: int, deaths: Deaths, *words: str, port: int = 0, spares: int = 0
) -> tuple[dict[int, str], dict[int, Outcome]]:
    """
    Return how processes died, and how the others ended, by their first ranks.

    With a `port`, rank 0 hosts the store there. `spares` more processes wait for a loss, numbered after the ranks.
    """
    words = ("processes.on_failure=continue", *words)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(run_with_deaths, ranks + spares, folder, words, deaths, port, spares, timeout=90, grace=60)
    return caught.value.failures, caught.value.values


def assert_same_trajectory(folder: Path, *words: str, rel: float = 1e-5) -> None:
    """
    Assert that every step was logged once, as in an undisturbed run of one process.

    Words about the mesh and about copies are ignored.
    """
    words = tuple(word for word in words if not word.startswith(("mesh.", "checkpoint.neighbour_every")))
    [outcome] = drawloom(folder, "run", "recipe.toml", "run.name=whole", *words)
    assert outcome.code == 0, outcome
    whole, survived = rows(folder / "runs/whole"), rows(folder / "runs/tiny")
    assert [row["step"] for row in survived] == [row["step"] for row in whole]
    assert [row["step"] for row in whole] == [*range(1, len(whole) + 1)] and len(whole) >= 8
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in survived] == pytest.approx([row[name] for row in whole], rel=rel), name


WAITING = '''
import time
from pathlib import Path

from drawloom import component


@component(impact="safe")
class Waiting:
    """A phase with long steps from step 6 on, until the file `go` exists."""

    def run_phase(self, step):
        time.sleep(1.5 * (step.index > 5 and not Path("go").exists()))


[waiting]
use = "waiting"

[edit.trainer.phases]
before."@report" = ["@waiting"]
'''


def replace_workers(folder: Path, count: int, words: tuple[str, ...]) -> tuple[int, str]:
    """
    Run `drawloom launch` with a spare, and kill rank 1's process, then the spare that has replaced it.

    When the process has joined that the launcher starts instead of the first one, and the one instead of the spare
    waits, kill all others. Return the exit code and the output.
    """
    errors, path = folder / "errors", folder / "runs/tiny/metrics.jsonl"
    options = "--spares", "1", "--max-restarts", "2"
    with errors.open("wb") as file, _launch_waiting_run(folder, count, options, words, file) as launcher:
        _wait(lambda: path.exists() and len(_list_workers(launcher)) == count + 1, launcher)
        spare = _list_workers(launcher)[-1]
        _wait(lambda: spare in find_waiting_spares(spare), launcher)
        os.kill(_list_workers(launcher)[1], signal.SIGKILL)
        _wait(lambda: "1 process joins" in errors.read_text("utf-8"), launcher)
        os.kill(spare, signal.SIGKILL)
        _wait(lambda: errors.read_text("utf-8").count("join") == 2, launcher)
        lines = path.read_bytes().count(b"\n")
        _wait(lambda: path.read_bytes().count(b"\n") > lines, launcher)
        _wait(lambda: len(find_waiting_spares(_list_workers(launcher)[0])) == 1, launcher)
        for member in {*_list_workers(launcher)} - {*find_waiting_spares(_list_workers(launcher)[0])}:
            os.kill(member, signal.SIGKILL)
        _wait(lambda: "all processes are gone" in errors.read_text("utf-8"), launcher)
        (folder / "go").touch()
        launcher.wait(60)
    return launcher.returncode, errors.read_text("utf-8")


def restart_workers(folder: Path, count: int, words: tuple[str, ...]) -> tuple[int, str]:
    """
    Run `drawloom launch`, kill rank 1's process, and when it has been started again and has joined, rank 0's.

    Return the exit code and the output.
    """
    errors, path = folder / "errors", folder / "runs/tiny/metrics.jsonl"
    with (
        errors.open("wb") as file,
        _launch_waiting_run(folder, count, ["--max-restarts", "2"], words, file) as launcher,
    ):
        for rank, joined in ((1, 0), (0, 1)):
            lines = path.read_bytes().count(b"\n") if path.exists() else 0
            _wait(partial(_has_more_lines, path, lines + 1), launcher)
            os.kill(_list_workers(launcher)[rank], signal.SIGKILL)
            _wait(partial(_has_joined_more_often, errors, joined), launcher)
        (folder / "go").touch()
        launcher.wait(60)
    return launcher.returncode, errors.read_text("utf-8")


def _has_more_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") > count


def _has_joined_more_often(errors: Path, count: int) -> bool:
    return errors.read_text("utf-8").count("process joins") > count


def _launch_waiting_run(
    folder: Path, count: int, options: Sequence[str], words: Sequence[str], output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start a run that survives losses, whose steps take long until the file `go` exists."""
    code, _, recipe = WAITING.partition("[waiting]")
    (folder / "waiting.py").write_text(code, "utf-8")
    (folder / "recipe.toml").write_text(f"{RECIPE}\n[waiting]{recipe}", "utf-8")
    start = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", str(count), *options]
    libraries = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])  # which may have the libraries
    environment = {"PYTHONPATH": libraries, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    command = [*start, "run", "recipe.toml", "processes.on_failure=continue", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def _wait(is_done: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def _list_workers(launcher: "subprocess.Popen[bytes]") -> list[int]:
    """Return the launcher's processes, the oldest first."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def find_waiting_spares(worker: int) -> list[int]:
    """Return the waiting spares of the launch with this worker."""
    lines = Path(f"/proc/{worker}/environ").read_text("utf-8").split("\0")
    launch = read_launch(dict(line.split("=", 1) for line in lines if "=" in line))
    # the process is the launcher's copy for a moment, with the launcher's environment
    return [] if launch.is_single_process else _list_waiting_spares(launch)


def _list_waiting_spares(launch: Launch) -> list[int]:
    store = connect_to_launch_store(launch.address, launch.port, launch.attempt, 10.0)
    run = Generation.from_json(store.get(CURRENT).decode()).run
    return [spare.pid for spare in Spares(PrefixStore(run, store)).find_waiting_spares().values()]
