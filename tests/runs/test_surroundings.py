"""Runs with failing surroundings: trackers, disks, memory, files, and their own nodes."""

import ctypes
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.checkpoint.manifest import list_checkpoints, step_of
from drawloom.components.checkpoint.reader import load_node
from drawloom.components.checkpoint.staging.copy_plan import Pool
from drawloom.components.checkpoint.state_hashes import state_hashes
from drawloom.components.listeners import profiler
from drawloom.components.phases.report import Report
from drawloom.components.ports.run import Step, Value
from drawloom.components.run.locks import FolderLock
from drawloom.components.trackers.aim import AimTracker
from drawloom.components.trackers.aim_repository import AimRun
from drawloom.graph.project import Project
from support import cgroups
from support.audit import Audit
from support.crashes import is_valid
from support.disk import Call, watch_calls
from support.mutations import put
from support.power import is_possible
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, command, drawloom, rows, series

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
TINY = ("run", "tiny.toml", "trainer.on_finish=[]")


def _learned(run: Path, step: int) -> dict[str, str]:
    """Hashes of weights and moments."""
    states = {node: load_node(run / f"checkpoints/step-{step}", node) for node in ("stages", "optimizer")}
    return state_hashes({node: dict(sorted(state.items())) for node, state in states.items()})


def _beset(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run whose tracker hangs, whose profiler raises, and whose disk is full for some steps."""

    def hang(*_: Any) -> None:
        time.sleep(1000)

    def raising(**_: Any) -> None:
        raise RuntimeError("no profile today")

    now = [0]
    report = Report.run_phase

    def counted(self: Report, step: Step) -> None:
        now[0] = step.index
        report(self, step)

    track = AimTracker.track_in_context

    def impatient(self: AimTracker, step: int, values: Mapping[str, Value], context: Mapping[str, str]) -> None:
        self.timeout = 2.0
        track(self, step, values, context)

    put(AimTracker, "track_in_context", impatient)
    put(AimRun, "track", hang)
    put(profiler, "profile", raising)
    put(Report, "run_phase", counted)

    def full(call: Call) -> None:
        if call.name == "write" and call.path.endswith("metrics.jsonl") and now[0] in (3, 4, 5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watch_calls(full):
        return command(folder, arguments, None)


def test_trackers_and_profilers_neither_stop_nor_change_a_run(place: Path) -> None:
    """
    A tracker that hangs, a profiler that raises and a full disk for metrics are one warning each, and the commit that
    outlives rows is another; weights and metrics equal those of an undisturbed run.
    """
    assert drawloom(place, *TINY, "run.name=straight")[0].code == 0
    aim = ("trackers.aim.use=trackers.aim", "trackers.aim.timeout=60")
    words = (*TINY, *aim, "listeners.profiler.use=listeners.profiler", "listeners.profiler.wait=0")
    [outcome] = run_ranks(_beset, 1, place, words, variables=False)
    assert outcome.code == 0 and "Traceback" not in outcome.text
    warnings = [line for line in outcome.text.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 4 and "no profile today" in warnings[0] and "No space left on device" in warnings[1], (
        outcome.text
    )
    assert "the rows of steps 3 to 4 are in memory only" in warnings[2]
    assert "Aim was not done within 2 s" in warnings[3]
    assert series(place / "runs/tiny", *LEARNED) == series(place / "runs/straight", *LEARNED)
    assert _learned(place / "runs/tiny", 10) == _learned(place / "runs/straight", 10)


def _full_while_exporting(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run whose disk is full during the export."""

    def full(call: Call) -> None:
        if call.name == "fsync" and "export" in call.path.partition("runs/tiny")[2]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)

    with watch_calls(full):
        return command(folder, arguments, None)


def test_a_failed_export_is_repeated(place: Path) -> None:
    """The weights are committed by then: the error is printed, and the same command repeats the export."""
    words = ("run", "tiny.toml", "trainer.on_finish=['@export']")
    [outcome] = run_ranks(_full_while_exporting, 1, place, words, variables=False)
    assert outcome.code == 1 and "No space left on device" in outcome.text and "Traceback" not in outcome.text
    assert not (place / "runs/tiny/export").exists()
    before = (place / "runs/tiny/metrics.jsonl").read_bytes()
    assert drawloom(place, *words)[0].code == 0
    assert (place / "runs/tiny/export/model.safetensors").exists()
    assert (place / "runs/tiny/metrics.jsonl").read_bytes() == before


def _few_files(folder: Path, arguments: Sequence[str]) -> Outcome:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6,) * 2)
    return command(folder, arguments, None)


def test_too_few_file_descriptors_are_an_error_before_the_first_step(place: Path) -> None:
    """The error is printed, and the run does not hang."""
    [outcome] = run_ranks(_few_files, 1, place, (*TINY, "data.workers=2"), variables=False)
    assert outcome.code == 1 and "Too many open files" in outcome.text, outcome
    assert not (place / "runs/tiny/metrics.jsonl").exists() or not rows(place / "runs/tiny")


def _little_memory(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run whose second copy needs more memory than there is."""
    allocate, asked = Pool._allocate, [0]

    def more(self: Pool, size: int) -> Any:
        asked[0] += 1
        return allocate(self, size if asked[0] == 1 else 2**60)

    put(Pool, "_allocate", more)
    put(Pool, "_release", lambda _self, _buffer: None)  # or the second copy would take the memory of the first
    return command(folder, arguments, None)


def test_no_memory_for_a_copy_ends_the_run_with_its_cause(place: Path) -> None:
    """It is not retried; committed checkpoints are intact, and the run resumes from them."""
    [outcome] = run_ranks(_little_memory, 1, place, TINY, variables=False)
    assert outcome.code == 1 and "bytes for a copy of the state" in outcome.text
    assert "Traceback" not in outcome.text
    saved = list_checkpoints(place / "runs/tiny/checkpoints")
    assert [step_of(path) for path in saved] == [4] and all(map(is_valid, saved))


def _without_shared_memory(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run in a mount namespace whose /dev/shm is full."""
    new_namespace, recursive, private = 0x20000, 0x4000, 1 << 18
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(new_namespace) or library.mount(b"none", b"/", None, recursive | private, None):
        raise OSError(ctypes.get_errno(), "no namespace of its own")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"], check=True)
    Path("/dev/shm/full").write_bytes(bytes(4096))
    return command(folder, arguments, None)


if is_possible():

    def test_a_lack_of_shared_memory_is_told_before_the_first_step(place: Path) -> None:
        """Containers have little of it, and data workers take the corpus from there: the remedy is named."""
        [outcome] = run_ranks(_without_shared_memory, 1, place, (*TINY, "data.workers=2"), variables=False)
        assert outcome.code == 1 and "No space left on device" in outcome.text and "workers = 0" in outcome.text
        [outcome] = run_ranks(_without_shared_memory, 1, place, TINY, variables=False)
        assert outcome.code == 0


def _with_few_threads(folder: Path, arguments: Sequence[str], group: Path) -> Outcome:
    cgroups.enter(group)
    return command(folder, arguments, None)


@pytest.mark.skipif(not cgroups.is_possible("pids"), reason="no control group of its own may be made here")
def test_a_limit_of_threads_is_told(place: Path) -> None:
    """A group that allows three threads more than the run has is named, without a traceback."""
    with cgroups.group("pids", max=3) as group:
        [outcome] = run_ranks(_with_few_threads, 1, place, TINY, group, variables=False)
    assert outcome.code == 1 and "no more threads can be started" in outcome.text, outcome
    assert "Traceback" not in outcome.text


def _in_little_memory(folder: Path, arguments: Sequence[str], group: Path) -> Outcome:
    """A process of a run; rank 1 takes more memory than its group has, in step 3."""
    run = Report.run_phase
    if os.environ["RANK"] == "1":
        cgroups.enter(group)

    def greedy(self: Report, step: Step) -> None:
        if step.index == 3 and os.environ["RANK"] == "1":
            torch.ones(2**30)
        run(self, step)

    put(Report, "run_phase", greedy)
    return command(folder, arguments, None)


@pytest.mark.skipif(not cgroups.is_possible("memory"), reason="no control group of its own may be made here")
def test_a_rank_without_memory_in_its_group_is_named(place: Path) -> None:
    """The kernel kills it, which no process can catch: another rank names it, and the run resumes."""
    words = (*TINY, "batch.micro_size=2", "checkpoint.every=2", "trainer.steps=4")
    with cgroups.group("memory", limit_in_bytes=2**30) as group, pytest.raises(RanksFailedError) as caught:
        run_ranks(_in_little_memory, 2, place, words, group)
    assert caught.value.failures == {1: "died with exit code -9"}
    assert "is gone: it was killed, or it crashed" in caught.value.values[0].text
    assert {outcome.code for outcome in drawloom(place, *words, ranks=2)} == {0}
    assert [row["step"] for row in rows(place / "runs/tiny")] == [1, 2, 3, 4]


FILES = ("metrics.jsonl", "sample.txt", "recipe.lock.toml", "run.lock")
FOLDERS = ("log", "checkpoints", "export")


def _misplaced(folder: Path) -> dict[str, Outcome]:
    """Runs whose folder holds a folder in place of a file, or the other way round."""
    found = {}
    for name in (*FILES, *FOLDERS):
        path = folder / "runs" / name.partition(".")[0] / name
        path.parent.mkdir(parents=True)
        path.mkdir() if name in FILES else path.touch()
        words = ("run", "tiny.toml", "trainer.steps=1", f"run.name={path.parent.name}")
        found[str(path.relative_to(folder))] = command(folder, words, None)
    return found


def test_a_folder_in_place_of_a_file_is_told_and_a_file_in_place_of_a_folder(place: Path) -> None:
    """Whatever a run writes: one line with its path, without a traceback."""
    [found] = run_ranks(_misplaced, 1, place, variables=False)
    for path, outcome in found.items():
        assert outcome.code == 1 and path in outcome.text and "Traceback" not in outcome.text, outcome
    assert (place / "runs/export/sample.txt").exists()  # an export that fails costs no sample


PIPES = ("sample.txt", ".export.partial-1", "checkpoints/.tmp-step-9", "checkpoints/.trash-step-1", ".sample.txt.tmp")


def test_pipes_of_a_stranger_delay_no_run(place: Path) -> None:
    """A received run folder with pipes in place of leftovers and of the sample is resumed to its end."""
    run = place / "runs" / "received"
    (run / "checkpoints").mkdir(parents=True)
    for name in PIPES:
        os.mkfifo(run / name)
    (run / "checkpoints" / "step-7").symlink_to("gone")
    words = ("tiny.toml", "trainer.steps=1", "run.name=received")
    [refused] = drawloom(place, "run", *words)
    assert refused.code == 1 and "step-7: it is a symbolic link" in refused.text, refused.text
    assert "Traceback" not in refused.text
    (run / "checkpoints" / "step-7").unlink()
    [outcome] = drawloom(place, "run", *words)
    assert outcome.code == 0, outcome.text
    assert (run / "sample.txt").is_file() and (run / "export").is_dir()


def _files() -> list[str]:
    """The open files of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself, by which they are listed
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _listening() -> list[str]:
    """The ports on which this process listens."""
    inodes = {*_files()}
    tables = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()]
    return [row[1] for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def _listen(folder: Path, arguments: Sequence[str]) -> tuple[Outcome, list[str], list[str]]:
    """A run: the ports on which it listens during a step, and what it pickles."""
    ports: list[str] = []
    report = Report.run_phase

    def looked(self: Report, step: Step) -> None:
        ports.extend(_listening())
        report(self, step)

    put(Report, "run_phase", looked)
    audit = Audit([])
    audit.install()
    audit.on = True
    outcome = command(folder, arguments, None)
    audit.on = False
    return outcome, ports, [line for line in audit.found if line.startswith("pickle")]


def test_a_run_on_one_machine_listens_nowhere_and_unpickles_nothing(place: Path) -> None:
    """One process needs no port; two use torchrun's, and no Python object is unpickled from the other."""
    [(outcome, ports, _)] = run_ranks(_listen, 1, place, (*TINY, "run.name=one"), variables=False)
    assert outcome.code == 0 and ports == []
    found = run_ranks(_listen, 2, place, (*TINY, "batch.micro_size=2", "checkpoint.every=3"))
    assert [outcome.code for outcome, *_ in found] == [0, 0]
    assert [line for *_, pickled in found for line in pickled] == []


def _fail_in_each(folder: Path) -> dict[str, list[str]]:
    """Open the graph of a run once per node, each time with that node failing; the files and threads left open."""
    os.chdir(folder)
    project = Project.of("drawloom")
    graph = project.graph(project.load("tiny.toml", [], ["data.workers=1"])).require_valid()
    left: dict[str, list[str]] = {}
    with project.container(graph):  # what the process keeps for good, it has by now
        pass
    for name in graph.topological_order(["trainer"]):
        kind = graph.nodes[name].spec.cls
        if not hasattr(kind, "open"):
            continue
        opening, before = kind.open, _held()

        def fail(self: Any, opening: Any = opening, name: str = name) -> None:
            opening(self)
            raise ZeroDivisionError(name)

        kind.open = fail
        try:
            with project.container(graph):
                raise AssertionError(name)
        except ZeroDivisionError as error:
            if str(error) != name:
                raise
        finally:
            kind.open = opening
        FolderLock(folder / "runs/tiny").release()
        left[name] = sorted({*_held()} - {*before})
    return left


def _held() -> list[str]:
    """Open files and threads of this process."""
    return _files() + [f"thread {thread.name}" for thread in threading.enumerate()]


def test_a_failed_open_leaves_nothing_open(place: Path) -> None:
    """For each node in turn: no file, thread or lock of it or of earlier nodes is left."""
    [left] = run_ranks(_fail_in_each, 1, place, variables=False)
    assert len(left) > 12 and {"folder", "checkpoint", "data", "stages"} <= left.keys()
    assert {name: held for name, held in left.items() if held} == {}


def test_a_changed_corpus_is_refused(place: Path) -> None:
    """The error has the old and new numbers of rows; --accept-changes resumes."""
    common = (*TINY, "trainer.steps=4")
    assert drawloom(place, *common)[0].code == 0
    (place / "corpus/part3.py").unlink()
    again = (*TINY, "trainer.steps=4", "data.prefetch=3")
    refused = drawloom(place, *again)[0]
    assert refused.code == 2 and "the corpus is not the one that this run began with: train had " in refused.text
    accepted = drawloom(place, *again, "--accept-changes")[0]
    assert accepted.code == 0 and "warning: the corpus is not the one" in accepted.text


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_a_diverged_run_stops_and_keeps_a_finite_checkpoint(place: Path, norm: str) -> None:
    """
    It stops after `max_skipped_steps` in a row; the newest checkpoint with a finite loss is kept.

    Where the host learns late that a step is skipped, its checkpoint knows it nevertheless.
    """
    words = (
        "optimizer.lr=1e30",
        "clip.max_norm=1e30",
        "trainer.max_skipped_steps=6",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        f"sync_gradients.norm={norm}",
    )
    outcome = drawloom(place, *TINY, *words)[0]
    assert outcome.code == 1 and "6 steps in a row were skipped, at last step 7: " in outcome.text
    assert [row.get("skipped", False) for row in rows(place / "runs/tiny")] == [False, *[True] * 6]
    saved = [step_of(path) for path in list_checkpoints(place / "runs/tiny/checkpoints")]
    assert saved == [1, 5, 6, 7]  # the newest with a finite loss, the one that was evaluated, and the newest two
    for path in list_checkpoints(place / "runs/tiny/checkpoints"):
        values = json.loads((path / "manifest.json").read_text())["values"]
        assert (values["loss"] is not None) == (step_of(path) == 1)
        weights = load_node(path, "stages").values()
        assert all(bool(torch.isfinite(each).all()) for each in weights if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_a_run_that_learns_nothing_ends_in_words(place: Path, norm: str) -> None:
    """With a learning rate of 1000 the run ends after ten lost steps, and exports and samples nothing."""
    words = ("optimizer.lr=1000", "trainer.steps=40", "checkpoint.every=5", f"sync_gradients.norm={norm}")
    outcome = drawloom(place, *TINY, *words)[0]
    assert outcome.code == 1 and "training has diverged: since step 2 the loss was above 16." in outcome.text
    run = place / "runs/tiny"
    assert len(rows(run)) in (10, 11) and not (run / "export").exists() and not (run / "sample.txt").exists()
    assert max(step_of(path) for path in list_checkpoints(run / "checkpoints")) < 11


def test_a_port_in_use_is_an_error(place: Path) -> None:
    """Processes that are started without torchrun, which finds a free port, raise within the timeout."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        words = [sys.executable, "-m", "drawloom", *TINY, "batch.micro_size=2", "processes.timeout=2"]
        done = subprocess.run(words, cwd=place, env=environment | launch, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "did not find the other 1" in done.stderr and "Traceback" not in done.stderr
