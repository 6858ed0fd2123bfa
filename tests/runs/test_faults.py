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
from support.forked_children import fork_children
from support.mutations import put
from support.processes import RanksFailedError, is_alive, run_ranks
from support.runs import Outcome, command, drawloom, rows, series, write_corpus

SOURCE = str(Path(__file__).parents[2] / "src")
LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
TWO = ("run", "tiny.toml", "batch.micro_size=2", "trainer.on_finish=[]")
LONG = (*TWO, "trainer.steps=1000000", "checkpoint.every='last'", "evaluate.every='never'")


def _last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _call_after_steps(folder: Path, steps: int, action: Callable[[], None]) -> None:
    """Call `action` in a thread once this many steps are tracked."""

    def wait_for_steps() -> None:
        while _last_step(folder / "runs/tiny") < steps:
            time.sleep(0.005)
        action()

    threading.Thread(target=wait_for_steps, daemon=True).start()


def _run_and_signal(folder: Path, arguments: Sequence[str], ranks: Sequence[int], steps: int, number: int) -> Outcome:
    """Run on one rank; some ranks send themselves a signal after this many steps."""
    if int(os.environ.get("RANK", "0")) in ranks:
        _call_after_steps(folder, steps, partial(os.kill, os.getpid(), number))
    return command(folder, arguments, None)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_stop_after_the_same_step(folder: Path, ranks: tuple[int, ...], number: int) -> None:
    """A signal to any rank ends all ranks with a checkpoint of one step and the signal's exit code."""
    outcomes = run_ranks(_run_and_signal, 2, folder, LONG, ranks, 3, int(number), timeout=40)
    assert [outcome.code for outcome in outcomes] == [128 + number] * 2
    assert not any("Traceback" in outcome.text for outcome in outcomes)
    saved = [path.name for path in (folder / "runs/tiny/checkpoints").iterdir()]
    assert saved == [f"step-{rows(folder / 'runs/tiny')[-1]['step']}"]


def _read_checkpoint(run: Path, step: int) -> list[bytes]:
    """Return the bytes of a checkpoint's files, of all ranks."""
    return [path.read_bytes() for path in sorted((run / f"checkpoints/step-{step}").glob("rank-*"))]


def _stop_repeatedly(folder: Path, ranks: int, times: int, seed: int) -> None:
    steps = 15 * times  # enough that the run does not end before its last stop
    common = (*TWO, f"trainer.steps={steps}", "checkpoint.every=7")
    assert {outcome.code for outcome in drawloom(folder, *common, "run.name=straight", ranks=ranks)} == {0}
    moments = random.Random(seed)
    stops = 0
    for _ in range(times):
        done = _last_step(folder / "runs/tiny")
        arguments = folder, common, range(ranks), done + moments.randrange(1, 8), int(signal.SIGTERM)
        began = time.monotonic()
        codes = {
            outcome.code for outcome in run_ranks(_run_and_signal, ranks, *arguments, variables=ranks > 1, timeout=60)
        }
        assert time.monotonic() - began < 25
        assert codes in ({143}, {0})
        stops += codes == {143}
        if codes == {0}:
            break
    assert stops > times // 2
    assert {outcome.code for outcome in drawloom(folder, *common, ranks=ranks)} == {0}
    assert series(folder / "runs/tiny", *LEARNED) == series(folder / "runs/straight", *LEARNED)
    assert _read_checkpoint(folder / "runs/tiny", steps) == _read_checkpoint(folder / "runs/straight", steps) != []


def test_stopped_runs_end_with_the_same_bits(folder: Path) -> None:
    """Two ranks stopped twice by SIGTERM at random steps end as the uninterrupted run."""
    _stop_repeatedly(folder, 2, 2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_runs_stopped_ten_times_end_with_the_same_bits(folder: Path, seed: int) -> None:
    """A run stopped at ten random steps ends as the uninterrupted run, on one process and on two."""
    _stop_repeatedly(folder, 1 + seed % 2, 10, seed)


def _read_output(failed: RanksFailedError, folder: Path, rank: int) -> str:
    """Return all output of a rank: its log, and its terminal if it ended."""
    outcome = failed.values.get(rank)
    return (folder / f"runs/tiny/log/rank-{rank}.log").read_text("utf-8") + (outcome.text if outcome else "")


LIMITS = ("listeners.timeouts.step=2", "listeners.timeouts.first_step=30", "listeners.timeouts.saving=30")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(folder: Path, rank: int) -> None:
    """The other rank ends within some seconds of the limit, and its log names the rank that does not answer."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(
            _run_and_signal, 2, folder, (*LONG, *LIMITS), (rank,), 3, int(signal.SIGSTOP), timeout=20, lost={rank}
        )
    output = _read_output(caught.value, folder, 1 - rank)
    assert f"rank {rank} does not answer" in output
    assert "Traceback" not in output


@pytest.mark.soak
def test_a_rank_stopped_at_any_moment_is_named(tmp_path: Path) -> None:
    """A rank stopped in a step, in a collective or while saving is named, in twenty attempts."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_corpus(folder)
        rank = number % 2
        saving = ("checkpoint.every=2", f"staging.use=checkpoint.staging.{['blocking', 'none'][number // 2 % 2]}")
        arguments = (*LONG, *LIMITS, "listeners.timeouts.saving=2", *saving)
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(
                _run_and_signal, 2, folder, arguments, (rank,), 3 + number, int(signal.SIGSTOP), timeout=20, lost={rank}
            )
        assert f"rank {rank} does not answer" in _read_output(caught.value, folder, 1 - rank)


def _run_slowly(folder: Path, arguments: Sequence[str], rank: int, number: int, seconds: float) -> Outcome:
    """Run on one rank; rank `rank` sleeps in step `number`."""
    run = ForwardBackward.run_phase

    def sleep_and_run(self: ForwardBackward, step: Step) -> None:
        if step.index == number and int(os.environ["RANK"]) == rank:
            time.sleep(seconds)
        run(self, step)

    put(ForwardBackward, "run_phase", sleep_and_run)
    return command(folder, arguments, None)


def test_a_slow_rank_is_a_warning_only(folder: Path) -> None:
    """A step longer than half its limit is a warning, and the run continues with unchanged results."""
    common = (*TWO, *LIMITS)
    assert {outcome.code for outcome in drawloom(folder, *common, "run.name=straight", ranks=2)} == {0}
    outcomes = run_ranks(_run_slowly, 2, folder, (*common, "listeners.timeouts.step=3"), 1, 5, 2.3)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    warning = "is slow: step 5 has taken more than 1.5 s in phase"
    assert f"rank 1 {warning} [forward_backward]" in (folder / "runs/tiny/log/rank-1.log").read_text()
    assert f"rank 0 {warning}" in outcomes[0].text
    assert _read_checkpoint(folder / "runs/tiny", 10) == _read_checkpoint(folder / "runs/straight", 10) != []


def test_a_long_first_step_is_not_a_hang(folder: Path) -> None:
    """The first step has its own limit."""
    limits = ("listeners.timeouts.step=0.5", "listeners.timeouts.first_step=30")
    outcomes = run_ranks(_run_slowly, 2, folder, (*TWO, *limits), 1, 1, 3.3)
    assert [outcome.code for outcome in outcomes] == [0, 0]


def _list_workers(agent: int) -> list[int]:
    """List the child processes."""
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def _start_torchrun(
    folder: Path, options: Sequence[str], words: Sequence[str], **files: Any
) -> "subprocess.Popen[bytes]":
    """Start a run under torchrun in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "drawloom", *words]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    return subprocess.Popen(command, cwd=folder, env=environment, **files)


def _wait_for(path: Path, name: str) -> None:
    """Wait up to a minute for a file or folder in a folder."""
    end = time.monotonic() + 60
    while not list(path.glob(name)) and time.monotonic() < end:
        time.sleep(0.02)


def _kill_worker_of_two_torchruns(folder: Path, options: Sequence[str], words: Sequence[str]) -> tuple[list[int], int]:
    """Kill the second torchrun's worker after a checkpoint; return how both torchruns end, and the worker."""
    fork_children()
    hosts = []
    for number in "01":
        with (folder / f"host-{number}").open("wb") as file:
            hosts.append(_start_torchrun(folder, [*options, number], words, stdout=file, stderr=file))
    _wait_for(folder / "runs/tiny/checkpoints", "step-*")
    [worker] = _list_workers(hosts[1].pid)
    os.kill(worker, signal.SIGKILL)
    return [host.wait(timeout=60) for host in hosts], worker


def test_two_torchruns_are_one_run(folder: Path) -> None:
    """
    Two launchers with one rank each train one run. If a rank is killed, both end and name the rank and its host.

    One process resumes from their checkpoint with the losses of an uninterrupted run.
    """
    words = (*TWO, "trainer.steps=60", "evaluate.every='never'")
    assert drawloom(folder, *words, "run.name=straight")[0].code == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--node-rank"]
    meshed = (*words, "mesh.data_shard=2")
    [(codes, worker)] = run_ranks(
        _kill_worker_of_two_torchruns, 1, folder, options, meshed, variables=False, timeout=200
    )
    assert codes == [1, 1]
    printed = [(folder / f"host-{number}").read_text("utf-8") for number in "01"]
    assert "2 processes on 2 hosts: data_shard 2" in printed[0]
    # Both ranks are on this machine, so rank 0 may be the first to report it, under its own host name.
    assert sum(text.count(f"rank 1 (process {worker}, on host ") for text in printed) >= 1
    assert " [host 1, data_shard 1] INFO" in (folder / "runs/tiny/log/rank-1.log").read_text("utf-8")
    taken = len(rows(folder / "runs/tiny"))
    assert taken < 60 and drawloom(folder, *words, "mesh.data_shard=1")[0].code == 0
    ours, theirs = (series(folder / "runs" / name, "step", "loss", "grad_norm") for name in ("tiny", "straight"))
    assert len(ours) == len(theirs) == 60
    for our_values, their_values in zip(ours, theirs, strict=True):
        assert our_values == pytest.approx(their_values, rel=1e-6)


@pytest.mark.soak
def test_workers_of_a_dead_torchrun_end_themselves(folder: Path) -> None:
    """After torchrun is killed, its workers end with one line, the folder is unlocked and the run resumes."""
    words, errors = (*LONG, "checkpoint.every=1"), folder / "errors"
    with (
        errors.open("wb") as file,
        _start_torchrun(
            folder, ["--standalone", "--nproc-per-node=2"], words, stdout=subprocess.DEVNULL, stderr=file
        ) as agent,
    ):
        _wait_for(folder / "runs/tiny/checkpoints", "step-*")
        workers = _list_workers(agent.pid)
        agent.kill()
        agent.wait()
    end = time.monotonic() + 2
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    left = list(filter(is_alive, workers))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2 and not left
    ends = [line for line in errors.read_text("utf-8").splitlines() if "is gone" in line or "frame #" in line]
    assert len(ends) == 1 and f"process {agent.pid}, which started this process, is gone" in ends[0], ends
    written = _last_step(folder / "runs/tiny")  # may include steps after the last commit, of before the next run
    outcomes = run_ranks(_run_and_signal, 2, folder, LONG, (0, 1), written + 2, int(signal.SIGTERM), timeout=40)
    assert [outcome.code for outcome in outcomes] == [143, 143]
    assert rows(folder / "runs/tiny")[0]["step"] == 1


def test_a_removed_checkpoint_folder_ends_the_run_with_an_error(folder: Path) -> None:
    """If the folder is removed during the run, training goes on for `failures` saves, then ends with the reason."""
    arguments = (*TWO, "trainer.steps=1000000", "checkpoint.every=5", "checkpoint.failures=2", "run.name=tiny")

    outcome = run_ranks(_run_and_remove_checkpoints, 1, folder, arguments, variables=False, timeout=60)[0]
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert "2 checkpoints in a row failed" in outcome.text and "No such file or directory" in outcome.text


def _run_and_remove_checkpoints(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run, and rename the checkpoint folder after six steps."""
    checkpoints = folder / "runs/tiny/checkpoints"
    _call_after_steps(folder, 6, partial(os.rename, checkpoints, folder / "gone"))
    return command(folder, arguments, None)
