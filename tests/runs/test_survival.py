"""Runs that continue in memory after the loss of processes (`processes.on_failure`)."""

import os
import re
import socket
import time
from pathlib import Path

import pytest

from drawloom.components.distributed.rank_monitor import RankMonitor
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, drawloom, rows
from support.survival import (
    Deaths,
    assert_same_trajectory,
    replace_workers,
    run_with_deaths,
    survive,
    write_recipe,
)

EXPERTS = (
    "mesh.expert=2",
    "model.use=model.qwen3.moe",
    "model.num_hidden_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=8",
    "model.intermediate_size=32",
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=16",
    "dispatcher.use=experts.all_to_all",
    "stages.dispatcher=@dispatcher",
)
"""Two replicas have half of the experts each, so that both leave when one is lost."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus and the recipe."""
    return write_recipe(tmp_path)


def test_a_run_survives_one_loss_after_another(folder: Path) -> None:
    """Rank 0 dies in a forward pass, later the next rank 0 after an update; the last rank computes the same."""
    deaths = {0: ("forward_backward", 3), 1: ("report", 6)}
    failures, outcomes = survive(folder, 3, deaths)
    assert failures == dict.fromkeys(deaths, "died with exit code -9") and [*outcomes] == [2]
    assert outcomes[2].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert "rank 0" in text and "2 of 3 processes continue" in text and "1 of 2 processes continue" in text
    assert {*re.findall(r"restored the state after step (\d) from memory", text)} == {"2", "5"}
    assert_same_trajectory(folder)


@pytest.mark.soak
def test_hanging_ranks_and_a_loss_while_groups_are_made_are_survived(folder: Path) -> None:
    """
    Rank 0 is stopped, rank 1 dies while the others make groups again, and rank 2 is stuck in Python later.

    Hanging ranks are killed and can't come back, and the last rank computes the same.
    """
    deaths: Deaths = {0: ("forward_backward", 3, "stopped"), 1: ("join", 2), 2: ("report", 5, "stuck")}
    words = "processes.heartbeat_timeout=30", "listeners.timeouts.step=4"
    start = time.monotonic()
    failures, outcomes = survive(folder, 4, deaths, *words)
    assert time.monotonic() - start < 45 and failures.keys() == deaths.keys()
    assert failures[0] == failures[1] == "died with exit code -9"
    assert failures[2] in ("died with exit code -9", "died with exit code 1")  # its own monitor may be faster
    assert outcomes[3].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert "is stopped (SIGSTOP)" in text and "hangs in step 5, phase [report]" in text
    assert_same_trajectory(folder)


def test_a_stop_is_not_forgotten_if_a_process_is_lost_in_the_same_step(folder: Path) -> None:
    """Rank 1 receives SIGTERM, and rank 0 dies; the others repeat the step, save it, and exit with 143."""
    deaths: Deaths = {0: ("forward_backward", 3), 1: ("forward_backward", 3, "terminated")}
    failures, outcomes = survive(folder, 3, deaths)
    assert failures == {0: "died with exit code -9"}
    assert [outcome.code for outcome in outcomes.values()] == [143, 143], outcomes
    assert [row["step"] for row in rows(folder / "runs/tiny")] == [1, 2, 3]
    assert (folder / "runs/tiny/checkpoints/step-3").is_dir()


def _run_and_wait_long(folder: Path, words: tuple[str, ...]) -> Outcome:
    """Run a process; rank 0 is killed, and rank 1 waits for the end of its process for six seconds."""
    if os.environ["RANK"] == "1":
        put(RankMonitor, "wait_until_lost_processes_end", lambda _self: time.sleep(6))
    return run_with_deaths(folder, words, {0: ("forward_backward", 3)}, 0, 0)


@pytest.mark.soak
def test_a_rank_that_waits_for_a_lost_process_costs_no_other_rank(folder: Path) -> None:
    """It waits for longer than the timeout of heartbeats; neither is it lost, nor is the other one to it."""
    words = ("processes.on_failure=continue", "processes.heartbeat_timeout=3")
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run_and_wait_long, 3, folder, words, timeout=90, grace=60)
    assert caught.value.failures == {0: "died with exit code -9"}
    assert [outcome.code for outcome in caught.value.values.values()] == [0, 0]


@pytest.mark.parametrize(
    ("words", "place", "step"),
    [
        (("mesh.data_shard=2",), "forward_backward", 5),
        pytest.param(("mesh.pipeline=2", "model.num_hidden_layers=2"), "forward_backward", 5, marks=pytest.mark.soak),
        pytest.param(("batch.global_size=8",), "signals", 4, marks=pytest.mark.soak),
        (EXPERTS, "forward_backward", 5),
    ],
    ids=["shards", "pipeline", "uneven", "experts"],
)
def test_a_replica_leaves_as_a_whole(folder: Path, words: tuple[str, ...], place: str, step: int) -> None:
    """
    Of four ranks two continue: the other replica, or as many replicas as divide the step's microbatches.

    The third rank waits as a spare, and ends with the run.
    """
    failures, outcomes = survive(folder, 4, {1: (place, step)}, *words)
    assert failures == {1: "died with exit code -9"}
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0]
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert text.count("2 of 4 processes continue") == 3
    assert_same_trajectory(folder, *words)


def test_rank_0_may_host_the_store(folder: Path) -> None:
    """Without a launcher that hosts it, another rank may be lost."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    failures, outcomes = survive(folder, 2, {1: ("forward_backward", 3)}, port=port)
    assert failures == {1: "died with exit code -9"} and outcomes[0].code == 0
    assert "1 of 2 processes continue" in outcomes[0].text


def test_lost_shards_are_in_a_neighbours_memory_or_on_disk(folder: Path) -> None:
    """
    Of four shards one is lost in step 6, and three ranks go on from the copies after step 4, newer than step 3 on disk.

    Later two neighbours are lost, and with them a shard's only copy: the last rank goes on from the newest checkpoint.
    """
    words = "mesh.data_shard=4", "checkpoint.neighbour_every=2", "checkpoint.every=3", "trainer.steps=10"
    dead = ("forward_backward", 10)  # in step 8: steps 5 and 6 are computed twice
    failures, outcomes = survive(folder, 4, {1: ("forward_backward", 6), 0: dead, 2: dead}, *words)
    assert failures == dict.fromkeys((0, 1, 2), "died with exit code -9") and outcomes[3].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert re.findall(r"restored the state after step (\d) from memory", text) == ["4"] * 3
    assert "3 of 4 processes continue" in text and "1 of 3 processes continue" in text
    assert re.search("the run continues from the state after step [36] on disk", text)  # 6 may not be committed yet
    assert re.search(r"copied to another rank's memory: \d+\.\d MB", text)
    assert_same_trajectory(folder, *words)


def test_without_copies_or_checkpoints_the_run_begins_anew(folder: Path) -> None:
    """The process stays, and the lost rank is named once; a pipeline without all stages ends."""
    failures, outcomes = survive(folder, 2, {1: ("forward_backward", 3)}, "mesh.data_shard=2")
    assert failures == {1: "died with exit code -9"} and outcomes[0].code == 0, outcomes
    assert (
        outcomes[0].text.count("is gone") == 1 and "continues from step 0: there is no checkpoint" in outcomes[0].text
    )
    assert_same_trajectory(folder)
    words = "mesh.pipeline=2", "model.num_hidden_layers=2", "run.name=pipeline"
    failures, outcomes = survive(folder, 2, {1: ("forward_backward", 3)}, *words)
    assert failures == {1: "died with exit code -9"} and outcomes[0].code == 1
    assert outcomes[0].text.count("is gone") == 1 and "continue" not in outcomes[0].text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("count", "replica", "words"),
    [(2, 1, ()), (4, 2, ("mesh.data_shard=2",)), (2, 1, ("mesh.data_shard=2", "checkpoint.neighbour_every=2"))],
    ids=["replicas", "replicas of shards", "shards"],
)
def test_the_launcher_replaces_lost_workers(folder: Path, count: int, replica: int, words: tuple[str, ...]) -> None:
    """
    A spare replaces a killed worker at once; when it is killed, too, the run shrinks, and grows by a new process.

    Then all workers are killed but a new one that waits, which goes on from the newest checkpoint. Every step's numbers
    are those of an undisturbed run, and the launcher exits with 0.
    """
    words = ("trainer.steps=60", "checkpoint.every=2", "--import=waiting.py", *words)
    code, errors = replace_workers(folder, count, words)
    assert code == 0 and "Traceback" not in errors, errors
    assert errors.count(f"{count - 1} of {count} processes continue; 1 process joins") == 1, errors
    assert errors.count(f"{replica} of {count} processes continue\n") == 1, errors  # each is printed once
    assert f"all processes are gone; 0 of {count} processes continue; 1 process joins\n" in errors, errors
    log = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert re.search(r"the run continues from the state after step \d+ on disk", log)
    assert errors.count(f"{replica} of {replica} processes continue; {replica} process") == 1, errors
    assert_same_trajectory(folder, *words)


def test_a_spare_continues_without_any_member(folder: Path) -> None:
    """Both members die at once: the spare goes on from the newest checkpoint."""
    dead = ("forward_backward", 6, "killed together")
    failures, outcomes = survive(folder, 2, {0: dead, 1: dead}, "checkpoint.every=2", spares=1)
    assert failures == dict.fromkeys((0, 1), "died with exit code -9") and outcomes[2].code == 0, outcomes
    assert "all processes are gone; 0 of 2 processes continue; 1 process joins" in outcomes[2].text
    assert "the run continues from the state after step 4 on disk" in outcomes[2].text
    assert_same_trajectory(folder)


def _run_and_find_local_rank(folder: Path, words: tuple[str, ...], dead: int) -> tuple[Outcome, str]:
    """Run a process, perhaps rank `dead`, a victim, or the last, a spare; return its last LOCAL_RANK, too."""
    outcome = run_with_deaths(folder, words, {dead: ("forward_backward", 5)}, 0, 1)
    return outcome, os.environ["LOCAL_RANK"]


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        (0, ()),
        (1, ("mesh.pipeline=2", "model.num_hidden_layers=2", "checkpoint.neighbour_every=1")),
    ],
    ids=["replica", "stage"],
)
def test_with_a_spare_every_number_is_bitwise_that_of_an_undisturbed_run(
    folder: Path, dead: int, words: tuple[str, ...]
) -> None:
    """
    A waiting process takes the place of a replica, or of the only replica's stage, so that the mesh is the same.

    It also takes the lost process's LOCAL_RANK, and so its GPU.
    """
    with pytest.raises(RanksFailedError) as caught:
        arguments = folder, ("processes.on_failure=continue", *words), dead
        run_ranks(_run_and_find_local_rank, 3, *arguments, timeout=90, grace=60)
    assert caught.value.failures == {dead: "died with exit code -9"}
    assert {rank: local for rank, (_, local) in caught.value.values.items()} == {1 - dead: str(1 - dead), 2: str(dead)}
    outcomes = [outcome for outcome, _ in caught.value.values.values()]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "1 of 2 processes continue; 1 process joins" in "".join(outcome.text for outcome in outcomes)
    survived = rows(folder / "runs/tiny")
    mesh = [word for word in words if "neighbour" not in word]
    assert [outcome.code for outcome in drawloom(folder, "run", "recipe.toml", "run.name=whole", *mesh, ranks=2)] == [
        0,
        0,
    ]
    whole = rows(folder / "runs/whole")
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in survived] == [row[name] for row in whole], name
    assert len(whole) == 8
