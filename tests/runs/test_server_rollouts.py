"""Reinforcement learning with completions by a server, on one process and on ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs.test_rollouts import LAYOUTS, RECIPE, SAMPLED, run
from support.completion_server import ServedModel, serve
from support.processes import RanksFailedError
from support.runs import deterministic_rows, drawloom, series, take_back


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE.replace(", exact = true", ', use = "rollouts.server"'), "utf-8")
    return tmp_path


@pytest.fixture
def server() -> Iterator[ServedModel]:
    with serve() as model:
        yield model


@pytest.mark.soak
def test_a_server_samples_from_the_newest_weights_on_every_mesh(lab: Path, server: ServedModel) -> None:
    """
    The server's log-probabilities are those of every step's policy, and the ratio's denominator; meshes share samples.

    A resumed run draws the same completions, and `evaluate --generate` needs no server.
    """
    words = (f"rollouts.url={server.url}", "rollouts.temperature=0.8")
    one = run(lab, "one", *words)
    mesh = run(lab, "stages", *words, *LAYOUTS["stages"], ranks=2)
    shards = run(lab, "shards", *words, *LAYOUTS["shards"], ranks=2)
    for folder in (one, mesh, shards):
        assert all(difference < 1e-4 for (difference,) in series(folder, "sampler_difference"))
        assert [ratio for (ratio,) in series(folder, "ratio")] == pytest.approx([1.0] * 4, abs=1e-5)
        assert series(folder, *SAMPLED) == series(one, *SAMPLED), folder
        assert not (folder / "policy").exists()
    assert len({entropy for (entropy,) in series(one, "entropy")}) == 4
    server.requests.clear()
    whole = deterministic_rows(one)
    take_back(one, 2)
    run(lab, "one", *words)
    assert deterministic_rows(one) == whole
    rows = [body for path, body in server.requests if path == "/v1/completions"]
    assert len({body["seed"] for body in rows}) == len(rows) - 1  # two requests ask about the temperature
    server.requests.clear()
    (outcome,) = drawloom(lab, "evaluate", "runs/one", "--generate", "--format", "json")
    assert outcome.code == 0 and json.loads(outcome.text)["completions"] > 0 and not server.requests


def test_a_lag_shows_in_the_ratio(lab: Path, server: ServedModel) -> None:
    """
    With `update_every = 2` every second step learns from the policy before: its ratio differs from 1.

    A run resumed after step 3, between two updates, has the same bits.
    """
    words = (f"rollouts.url={server.url}", "rollouts.update_every=2", "checkpoint.every=1")
    folder = run(lab, "lagging", *words)
    differences = [difference for (difference,) in series(folder, "sampler_difference")]
    assert max(differences[::2]) < 1e-4 < 1e-3 < min(differences[1::2])
    whole, last = deterministic_rows(folder), folder / "checkpoints/step-4"
    before = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    take_back(folder, 3)
    run(lab, "lagging", *words)
    assert deterministic_rows(folder) == whole
    assert {path.name: path.read_bytes() for path in last.glob("rank-*")} == before != {}


def test_a_server_samples_ahead_of_the_policy(lab: Path, server: ServedModel) -> None:
    """
    With `rollout.lag = 1` completions are of the policy before the last update, and the same on ranks.

    A resumed run asks again for an unfinished rollout, with its own weights.
    """
    words = (f"rollouts.url={server.url}", "rollout.lag=1")
    one = run(lab, "one", *words)
    shards = run(lab, "shards", *words, *LAYOUTS["shards"], ranks=2)
    differences = [difference for (difference,) in series(one, "sampler_difference")]
    assert differences[0] < 1e-4 < 1e-3 < min(differences[1:])
    names = (*SAMPLED, "lag")
    assert series(shards, *names) == series(one, *names) and [lag for (lag,) in series(one, "lag")] == [0, 1, 1, 1]
    before = series(one, *names)
    take_back(one, 2)
    run(lab, "one", *words)
    assert series(one, *names)[:2] == before[:2] and [lag for (lag,) in series(one, "lag")] == [0, 1, 0, 1]


def test_a_server_that_fails_ends_all_ranks_with_one_message(lab: Path, server: ServedModel) -> None:
    """A failure in a later step is printed once, with the address and a remedy, and the step is not saved."""
    seen: list[str] = []

    def fail(path: str, body: object) -> tuple[int, object] | None:
        seen.append(path)
        return (503, {"message": "out of memory"}) if seen.count("/collective_rpc") > 3 else None

    server.fault = fail
    recipe = "run", "tiny.toml", "run.name=tiny", f"rollouts.url={server.url}", "rollouts.retries=0"
    words = (*recipe, *LAYOUTS["shards"])
    try:
        outcomes = drawloom(lab, *words, ranks=2)
    except RanksFailedError as failed:
        outcomes = [*failed.values.values()]
    assert all(outcome.code != 0 for outcome in outcomes)
    printed = "\n".join(path.read_text("utf-8") for path in lab.glob("printed-*"))
    assert printed.count(f'{server.url}/collective_rpc: HTTP 503: {{"message": "out of memory"}}') == 1, printed


def start_server(port: int) -> "subprocess.Popen[bytes]":
    """Start a server in a process of its own, which has no weights before a run sends some."""
    code = f"import time; from support.completion_server import serve\nwith serve(port={port}): time.sleep(999)"
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.soak
def test_a_server_that_is_killed_and_started_again_changes_no_bit(lab: Path) -> None:
    """While the server's process is killed and started again, the run waits, and ends like one without a fault."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        f"rollouts.url=http://127.0.0.1:{port}",
        "rollouts.retries=30",
        "trainer.steps=3",
        "rollouts.connections=2",
    )
    server = start_server(port)
    deaths: list[int] = []

    def kill_and_start(metrics: Path) -> None:
        nonlocal server
        for lines in (1, 2):
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
                time.sleep(0.002)
            server.kill()
            deaths.append(server.wait())
            server = start_server(port)

    try:
        while not is_open(port):
            time.sleep(0.05)
        unbroken = run(lab, "unbroken", *words)
        killer = threading.Thread(target=kill_and_start, args=(lab / "runs/killed/metrics.jsonl",))
        killer.start()
        killed = run(lab, "killed", *words)
        killer.join()
    finally:
        server.kill()
        server.wait()
    assert deaths == [-signal.SIGKILL] * 2
    assert deterministic_rows(killed) == deterministic_rows(unbroken)
