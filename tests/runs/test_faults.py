"""Runs whose ranks are stopped, signalled, slow or faulty: how they end, and what they report."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.run import Step
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, command, drawloom, rows, series, write_corpus

SOURCE = str(Path(__file__).parents[2] / "src")
LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
TWO = ("run", "tiny.toml", "batch.micro_size=2", "trainer.on_finish=[]")
LONG = (*TWO, "trainer.steps=1000000", "checkpoint.every='last'", "evaluate.every='never'")


def _last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _when(folder: Path, steps: int, deed: Callable[[], None]) -> None:
    """Call `deed` in a thread once this many steps are tracked."""

    def wait() -> None:
        while _last_step(folder / "runs/tiny") < steps:
            time.sleep(0.005)
        deed()

    threading.Thread(target=wait, daemon=True).start()


def _struck(folder: Path, arguments: Sequence[str], ranks: Sequence[int], steps: int, number: int) -> Outcome:
    """A process of a run; some ranks send themselves a signal after this many steps."""
    if int(os.environ.get("RANK", "0")) in ranks:
        _when(folder, steps, partial(os.kill, os.getpid(), number))
    return command(folder, arguments, None)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_stop_after_the_same_step(place: Path, ranks: tuple[int, ...], number: int) -> None:
    """Whether one rank or all got the signal: a checkpoint of that step, the signal's exit code, no traceback."""
    outcomes = run_ranks(_struck, 2, place, LONG, ranks, 3, int(number), timeout=40)
    assert [outcome.code for outcome in outcomes] == [128 + number] * 2
    assert not any("Traceback" in outcome.text for outcome in outcomes)
    saved = [path.name for path in (place / "runs/tiny/checkpoints").iterdir()]
    assert saved == [f"step-{rows(place / 'runs/tiny')[-1]['step']}"]


def _bits(run: Path, step: int) -> list[bytes]:
    """The bytes of every file of every rank of a checkpoint."""
    return [path.read_bytes() for path in sorted((run / f"checkpoints/step-{step}").glob("rank-*"))]


def _stopped_again_and_again(place: Path, ranks: int, times: int, seed: int) -> None:
    steps = 15 * times  # so many that it is not over before it was stopped that often
    common = (*TWO, f"trainer.steps={steps}", "checkpoint.every=7")
    assert {outcome.code for outcome in drawloom(place, *common, "run.name=straight", ranks=ranks)} == {0}
    moments = random.Random(seed)
    stops = 0
    for _ in range(times):
        done = _last_step(place / "runs/tiny")
        arguments = place, common, range(ranks), done + moments.randrange(1, 8), int(signal.SIGTERM)
        began = time.monotonic()
        codes = {outcome.code for outcome in run_ranks(_struck, ranks, *arguments, variables=ranks > 1, timeout=60)}
        assert time.monotonic() - began < 25
        assert codes in ({143}, {0})
        stops += codes == {143}
        if codes == {0}:
            break
    assert stops > times // 2
    assert {outcome.code for outcome in drawloom(place, *common, ranks=ranks)} == {0}
    assert series(place / "runs/tiny", *LEARNED) == series(place / "runs/straight", *LEARNED)
    assert _bits(place / "runs/tiny", steps) == _bits(place / "runs/straight", steps) != []


def test_stopped_runs_end_with_the_same_bits(place: Path) -> None:
    """Two ranks stopped twice by SIGTERM at random steps end as the uninterrupted run."""
    _stopped_again_and_again(place, 2, 2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_thirty_stops(place: Path, seed: int) -> None:
    """Thirty stops, on one process and on two."""
    _stopped_again_and_again(place, 1 + seed % 2, 10, seed)


def _output(failed: RanksFailedError, place: Path, rank: int) -> str:
    """All output of a rank: its log, and its terminal if it ended."""
    outcome = failed.values.get(rank)
    return (place / f"runs/tiny/log/rank-{rank}.log").read_text("utf-8") + (outcome.text if outcome else "")


LIMITS = ("listeners.timeouts.step=2", "listeners.timeouts.first_step=30", "listeners.timeouts.saving=30")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(place: Path, rank: int) -> None:
    """The other rank ends within the limit and some seconds, and its log names the rank that does not answer."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_struck, 2, place, (*LONG, *LIMITS), (rank,), 3, int(signal.SIGSTOP), timeout=20, lost={rank})
    output = _output(caught.value, place, 1 - rank)
    assert f"rank {rank} does not answer" in output
    assert "Traceback" not in output


@pytest.mark.soak
def test_a_rank_stopped_at_any_moment_is_named(tmp_path: Path) -> None:
    """Twenty times: in a step, in a collective, while saving."""
    for number in range(20):
        place = tmp_path / str(number)
        place.mkdir()
        write_corpus(place)
        rank = number % 2
        saving = ("checkpoint.every=2", f"staging.use=checkpoint.staging.{['blocking', 'none'][number // 2 % 2]}")
        arguments = (*LONG, *LIMITS, "listeners.timeouts.saving=2", *saving)
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(_struck, 2, place, arguments, (rank,), 3 + number, int(signal.SIGSTOP), timeout=20, lost={rank})
        assert f"rank {rank} does not answer" in _output(caught.value, place, 1 - rank)


def _slow(folder: Path, arguments: Sequence[str], rank: int, number: int, seconds: float) -> Outcome:
    """A process of a run of which one rank is slow in one step."""
    run = ForwardBackward.run_phase

    def slowly(self: ForwardBackward, step: Step) -> None:
        if step.index == number and int(os.environ["RANK"]) == rank:
            time.sleep(seconds)
        run(self, step)

    put(ForwardBackward, "run_phase", slowly)
    return command(folder, arguments, None)


def test_a_slow_rank_is_a_warning_only(place: Path) -> None:
    """A step that takes more than half of its limit is a warning; the run continues with unchanged results."""
    common = (*TWO, *LIMITS)
    assert {outcome.code for outcome in drawloom(place, *common, "run.name=straight", ranks=2)} == {0}
    outcomes = run_ranks(_slow, 2, place, (*common, "listeners.timeouts.step=3"), 1, 5, 2.3)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    warning = "is slow: step 5 has taken more than 1.5 s in phase"
    assert f"rank 1 {warning} [forward_backward]" in (place / "runs/tiny/log/rank-1.log").read_text()
    assert f"rank 0 {warning}" in outcomes[0].text
    assert _bits(place / "runs/tiny", 10) == _bits(place / "runs/straight", 10) != []


def test_a_long_first_step_is_no_hang(place: Path) -> None:
    """The first step has its own limit."""
    limits = ("listeners.timeouts.step=0.5", "listeners.timeouts.first_step=30")
    outcomes = run_ranks(_slow, 2, place, (*TWO, *limits), 1, 1, 3.3)
    assert [outcome.code for outcome in outcomes] == [0, 0]


def _workers(agent: int) -> list[int]:
    """The processes that a process has started and that run drawloom."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"drawloom" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _torchrun(folder: Path, how: Sequence[str], words: Sequence[str], **files: Any) -> "subprocess.Popen[bytes]":
    """A torchrun that begins a run in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", "drawloom", *words]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    return subprocess.Popen(command, cwd=folder, env=environment, **files)


def _wait_for(path: Path, name: str) -> None:
    """Wait up to a minute for a file or folder in a folder."""
    end = time.monotonic() + 60
    while not list(path.glob(name)) and time.monotonic() < end:
        time.sleep(0.02)


def test_two_torchruns_are_one_run(place: Path) -> None:
    """
    Each starts one of two ranks, as on two hosts. A killed rank is named with its host, and both end; one process goes
    on from their checkpoint with the losses of a run that was not interrupted.
    """
    words = (*TWO, "trainer.steps=60", "evaluate.every='never'")
    assert drawloom(place, *words, "run.name=straight")[0].code == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    how = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--node-rank"]
    hosts, meshed = [], (*words, "mesh.data_shard=2")
    for number in "01":
        with (place / f"host-{number}").open("wb") as file:
            hosts.append(_torchrun(place, [*how, number], meshed, stdout=file, stderr=file))
    _wait_for(place / "runs/tiny/checkpoints", "step-*")
    [worker] = _workers(hosts[1].pid)
    os.kill(worker, signal.SIGKILL)
    assert [host.wait(timeout=60) for host in hosts] == [1, 1]
    printed = [(place / f"host-{number}").read_text("utf-8") for number in "01"]
    assert "2 processes on 2 hosts: data_shard 2" in printed[0]
    # Both are on this machine, so that rank 0 may be the first to see it: by the name of its own host.
    assert sum(text.count(f"rank 1 (process {worker}, on host ") for text in printed) >= 1
    assert " [host 1, data_shard 1] INFO" in (place / "runs/tiny/log/rank-1.log").read_text("utf-8")
    taken = len(rows(place / "runs/tiny"))
    assert taken < 60 and drawloom(place, *words, "mesh.data_shard=1")[0].code == 0
    ours, theirs = (series(place / "runs" / name, "step", "loss", "grad_norm") for name in ("tiny", "straight"))
    assert len(ours) == len(theirs) == 60
    for mine, their in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(their, rel=1e-6)


def test_workers_of_a_dead_torchrun_end_themselves(place: Path) -> None:
    """After torchrun is killed its workers end, the folder is unlocked, and the run resumes."""
    words, silent = (*LONG, "checkpoint.every=1"), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with _torchrun(place, ["--standalone", "--nproc-per-node=2"], words, **silent) as agent:
        _wait_for(place / "runs/tiny/checkpoints", "step-*")
        workers = _workers(agent.pid)
        agent.kill()
        agent.wait()
    end = time.monotonic() + 2
    while any(map(_lives, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    left = list(filter(_lives, workers))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2 and not left
    written = _last_step(place / "runs/tiny")  # may be more than was committed, and are there before the next run is
    outcomes = run_ranks(_struck, 2, place, LONG, (0, 1), written + 2, int(signal.SIGTERM), timeout=40)
    assert [outcome.code for outcome in outcomes] == [143, 143]
    assert rows(place / "runs/tiny")[0]["step"] == 1


def test_a_removed_checkpoint_folder_ends_the_run_with_an_error(place: Path) -> None:
    """If it is removed during the run, training continues for `failures` saves, and then stops with the reason."""
    arguments = (*TWO, "trainer.steps=1000000", "checkpoint.every=5", "checkpoint.failures=2", "run.name=tiny")

    outcome = run_ranks(_removing, 1, place, arguments, variables=False, timeout=60)[0]
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert "2 checkpoints in a row failed" in outcome.text and "No such file or directory" in outcome.text


def _removing(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A process of a run whose checkpoints are removed after six steps."""
    checkpoints = folder / "runs/tiny/checkpoints"
    _when(folder, 6, partial(os.rename, checkpoints, folder / "gone"))
    return command(folder, arguments, None)
