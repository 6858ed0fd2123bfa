"""Runs with failing surroundings: trackers, disks, memory, files, and their own nodes."""

import ctypes
import errno
import json
import os
import resource
import signal
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

from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.checkpoint.staging.copy_plan import Pool
from drawloom.components.checkpoint.state_hashes import hash_states
from drawloom.components.listeners import profiler
from drawloom.components.phases.report import Report
from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Value
from drawloom.components.run.locks import FolderLock
from drawloom.components.trackers.aim import AimTracker
from drawloom.graph.project import Project
from support import cgroups
from support.audit import Audit
from support.crashes import is_valid
from support.disk import Call, watch_calls
from support.mutations import put
from support.power import is_possible
from support.processes import RanksFailedError, run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, rows, series

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
TINY = ("run", "tiny.toml", "trainer.on_finish=[]")


def _hash_state(run: Path, step: int) -> dict[str, str]:
    """Return the hashes of weights and moments."""
    states = {node: load_node_state(run / f"checkpoints/step-{step}", node) for node in ("stages", "optimizer")}
    return hash_states({node: dict(sorted(state.items())) for node, state in states.items()})


def _run_with_faults(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run with a tracker that hangs, a profiler that raises, and a disk that is full for some steps."""

    def hang(*_: Any) -> None:
        time.sleep(1000)

    def fail(**_: Any) -> None:
        raise RuntimeError("no profile today")

    step_index = [0]
    report = Report.run_phase

    def count_and_report(self: Report, step: Step) -> None:
        step_index[0] = step.index
        report(self, step)

    track = AimTracker.track_in_context

    def track_with_short_timeout(
        self: AimTracker, step: int, values: Mapping[str, Value], context: Mapping[str, str]
    ) -> None:
        self.timeout = 2.0
        track(self, step, values, context)

    put(AimTracker, "track_in_context", track_with_short_timeout)
    put(AimTracker, "_write_values", hang)
    put(profiler, "profile", fail)
    put(Report, "run_phase", count_and_report)

    def fail_write(call: Call) -> None:
        if call.name == "write" and call.path.endswith("metrics.jsonl") and step_index[0] in (3, 4, 5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watch_calls(fail_write):
        return command(folder, arguments, None)


def test_trackers_and_profilers_neither_stop_nor_change_a_run(folder: Path) -> None:
    """
    A tracker that hangs, a profiler that raises and a full disk for metrics print one warning per fault.

    A commit without its metric rows prints another. Weights and metrics equal an undisturbed run's.
    """
    assert drawloom(folder, *TINY, "run.name=straight")[0].code == 0
    aim = ("trackers.aim.use=trackers.aim", "trackers.aim.timeout=60")
    # Without staging a commit flushes at once; a thread would, before or after the next row.
    profiler = ("listeners.profiler.use=listeners.profiler", "listeners.profiler.wait=0")
    (folder / "at_once.toml").write_text('unset = ["checkpoint.staging"]\n')
    words = (*TINY, *aim, *profiler, "--overlay", "at_once.toml")
    [outcome] = run_ranks(_run_with_faults, 1, folder, words, variables=False)
    assert outcome.code == 0 and "Traceback" not in outcome.text
    warnings = [line for line in outcome.text.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 4 and "no profile today" in warnings[0] and "No space left on device" in warnings[1], (
        outcome.text
    )
    assert "the rows of steps 3 to 4 are in memory only" in warnings[2]
    assert "Aim was not done within 2 s" in warnings[3]
    assert series(folder / "runs/tiny", *LEARNED) == series(folder / "runs/straight", *LEARNED)
    assert _hash_state(folder / "runs/tiny", 10) == _hash_state(folder / "runs/straight", 10)


def _run_with_full_disk_in_export(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run with a disk that is full during the export."""

    def fail_fsync(call: Call) -> None:
        if call.name == "fsync" and "export" in call.path.partition("runs/tiny")[2]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)

    with watch_calls(fail_fsync):
        return command(folder, arguments, None)


def test_a_failed_export_is_repeated(folder: Path) -> None:
    """A failed export prints the error, and the same command exports the committed weights."""
    words = ("run", "tiny.toml", "trainer.on_finish=['@export']")
    [outcome] = run_ranks(_run_with_full_disk_in_export, 1, folder, words, variables=False)
    assert outcome.code == 1 and "No space left on device" in outcome.text and "Traceback" not in outcome.text
    assert not (folder / "runs/tiny/export").exists()
    before = (folder / "runs/tiny/metrics.jsonl").read_bytes()
    assert drawloom(folder, *words)[0].code == 0
    assert (folder / "runs/tiny/export/model.safetensors").exists()
    assert (folder / "runs/tiny/metrics.jsonl").read_bytes() == before


def _run_with_few_files(folder: Path, arguments: Sequence[str]) -> Outcome:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6,) * 2)
    return command(folder, arguments, None)


def test_too_few_file_descriptors_are_an_error_before_the_first_step(folder: Path) -> None:
    """The run prints the error and does not hang."""
    [outcome] = run_ranks(_run_with_few_files, 1, folder, (*TINY, "data.workers=2"), variables=False)
    assert outcome.code == 1 and "Too many open files" in outcome.text, outcome
    assert not (folder / "runs/tiny/metrics.jsonl").exists() or not rows(folder / "runs/tiny")


def _run_with_little_memory(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run with a second checkpoint copy that needs more memory than the machine has."""
    allocate, calls = Pool._allocate, [0]

    def allocate_too_much(self: Pool, size: int) -> Any:
        calls[0] += 1
        return allocate(self, size if calls[0] == 1 else 2**60)

    put(Pool, "_allocate", allocate_too_much)
    put(Pool, "_release", lambda _self, _buffer: None)  # or the second copy would take the memory of the first
    return command(folder, arguments, None)


def test_no_memory_for_a_copy_ends_the_run_with_its_cause(folder: Path) -> None:
    """A copy without memory is not retried, and committed checkpoints are intact."""
    [outcome] = run_ranks(_run_with_little_memory, 1, folder, TINY, variables=False)
    assert outcome.code == 1 and "bytes for a copy of the state" in outcome.text
    assert "Traceback" not in outcome.text
    saved = list_checkpoints(folder / "runs/tiny/checkpoints")
    assert [step_of_checkpoint(path) for path in saved] == [4] and all(map(is_valid, saved))


def _run_without_shared_memory(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run in a mount namespace with a full /dev/shm."""
    new_namespace, recursive, private = 0x20000, 0x4000, 1 << 18
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(new_namespace) or library.mount(b"none", b"/", None, recursive | private, None):
        raise OSError(ctypes.get_errno(), "no namespace of its own")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"], check=True)
    Path("/dev/shm/full").write_bytes(bytes(4096))
    return command(folder, arguments, None)


if is_possible():

    def test_a_lack_of_shared_memory_is_reported_before_the_first_step(folder: Path) -> None:
        """Data workers without shared memory, as in containers, end the run with the remedy `workers = 0`."""
        [outcome] = run_ranks(_run_without_shared_memory, 1, folder, (*TINY, "data.workers=2"), variables=False)
        assert outcome.code == 1 and "No space left on device" in outcome.text and "workers = 0" in outcome.text
        [outcome] = run_ranks(_run_without_shared_memory, 1, folder, TINY, variables=False)
        assert outcome.code == 0


def _run_with_few_threads(folder: Path, arguments: Sequence[str], group: Path) -> Outcome:
    cgroups.enter(group)
    return command(folder, arguments, None)


@pytest.mark.skipif(not cgroups.is_possible("pids"), reason="no control group of its own may be made here")
def test_a_thread_limit_is_reported(folder: Path) -> None:
    """A control group with room for three more threads ends the run in words, without a traceback."""
    with cgroups.group("pids", max=3) as group:
        [outcome] = run_ranks(_run_with_few_threads, 1, folder, TINY, group, variables=False)
    assert outcome.code == 1 and "no more threads can be started" in outcome.text, outcome
    assert "Traceback" not in outcome.text


def _run_in_small_group(folder: Path, arguments: Sequence[str], group: Path) -> Outcome:
    """Run on one rank; rank 1 allocates more memory than its control group allows in step 3."""
    run = Report.run_phase
    if os.environ["RANK"] == "1":
        cgroups.enter(group)

    def allocate_and_report(self: Report, step: Step) -> None:
        if step.index == 3 and os.environ["RANK"] == "1":
            torch.ones(2**30)
        run(self, step)

    put(Report, "run_phase", allocate_and_report)
    return command(folder, arguments, None)


@pytest.mark.skipif(not cgroups.is_possible("memory"), reason="no control group of its own may be made here")
def test_a_rank_without_memory_in_its_group_is_named(folder: Path) -> None:
    """Another rank names the rank that the kernel killed, and the run resumes."""
    words = (*TINY, "batch.micro_size=2", "checkpoint.every=2", "trainer.steps=4")
    with cgroups.group("memory", limit_in_bytes=2**30) as group, pytest.raises(RanksFailedError) as caught:
        run_ranks(_run_in_small_group, 2, folder, words, group)
    assert caught.value.failures == {1: "died with exit code -9"}
    assert "is gone: it was killed, or it crashed" in caught.value.values[0].text
    assert {outcome.code for outcome in drawloom(folder, *words, ranks=2)} == {0}
    assert [row["step"] for row in rows(folder / "runs/tiny")] == [1, 2, 3, 4]


FILES = ("metrics.jsonl", "sample.txt", "recipe.lock.toml", "run.lock")
FOLDERS = ("log", "checkpoints", "export")


def _run_with_misplaced_paths(folder: Path) -> dict[str, Outcome]:
    """Start runs with a folder where a file belongs, or a file where a folder belongs; return outcomes by path."""
    outcomes = {}
    for name in (*FILES, *FOLDERS):
        path = folder / "runs" / name.partition(".")[0] / name
        path.parent.mkdir(parents=True)
        path.mkdir() if name in FILES else path.touch()
        words = ("run", "tiny.toml", "trainer.steps=1", f"run.name={path.parent.name}")
        outcomes[str(path.relative_to(folder))] = command(folder, words, None)
    return outcomes


def test_a_folder_in_place_of_a_file_is_reported_and_a_file_in_place_of_a_folder(folder: Path) -> None:
    """The error names the path of every misplaced file or folder, without a traceback."""
    [outcomes] = run_ranks(_run_with_misplaced_paths, 1, folder, variables=False)
    for path, outcome in outcomes.items():
        assert outcome.code == 1 and path in outcome.text and "Traceback" not in outcome.text, outcome
    assert (folder / "runs/export/sample.txt").exists()  # the sample is written though the export failed


PIPES = ("sample.txt", ".export.partial-1", "checkpoints/.tmp-step-9", "checkpoints/.trash-step-1", ".sample.txt.tmp")


def test_pipes_in_a_received_folder_do_not_block_a_run(folder: Path) -> None:
    """A received run folder with pipes in place of leftovers and of the sample is resumed to its end."""
    run = folder / "runs" / "received"
    (run / "checkpoints").mkdir(parents=True)
    for name in PIPES:
        os.mkfifo(run / name)
    (run / "checkpoints" / "step-7").symlink_to("gone")
    words = ("tiny.toml", "trainer.steps=1", "run.name=received")
    [refused] = drawloom(folder, "run", *words)
    assert refused.code == 1 and "step-7: it is a symbolic link" in refused.text, refused.text
    assert "Traceback" not in refused.text
    (run / "checkpoints" / "step-7").unlink()
    [outcome] = drawloom(folder, "run", *words)
    assert outcome.code == 0, outcome.text
    assert (run / "sample.txt").is_file() and (run / "export").is_dir()


def _list_files() -> list[str]:
    """List the open files of this process."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listed folder itself
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return files


def _list_ports() -> list[str]:
    """List the ports on which this process listens."""
    inodes = {*_list_files()}
    tables = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()]
    return [row[1] for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def _run_and_list_ports(folder: Path, arguments: Sequence[str]) -> tuple[Outcome, list[str], list[str]]:
    """Run; return the outcome, the listening ports during steps, and the unpickled types."""
    ports: list[str] = []
    report = Report.run_phase

    def report_and_list_ports(self: Report, step: Step) -> None:
        ports.extend(_list_ports())
        report(self, step)

    put(Report, "run_phase", report_and_list_ports)
    audit = Audit([])
    audit.install()
    audit.on = True
    outcome = command(folder, arguments, None)
    audit.on = False
    return outcome, ports, [line for line in audit.found if line.startswith("pickle")]


def test_a_run_on_one_machine_listens_nowhere_and_unpickles_nothing(folder: Path) -> None:
    """One process listens on no port, and two processes do not unpickle Python objects."""
    [(outcome, ports, _)] = run_ranks(_run_and_list_ports, 1, folder, (*TINY, "run.name=one"), variables=False)
    assert outcome.code == 0 and ports == []
    results = run_ranks(_run_and_list_ports, 2, folder, (*TINY, "batch.micro_size=2", "checkpoint.every=3"))
    assert [outcome.code for outcome, *_ in results] == [0, 0]
    assert [line for *_, pickled in results for line in pickled] == []


def _open_with_failing_nodes(folder: Path) -> dict[str, list[str]]:
    """Open a run's graph once per node with this node failing; return the files and threads left open."""
    os.chdir(folder)
    project = Project.from_package("drawloom")
    graph = project.graph(project.load("tiny.toml", [], ["data.workers=1"])).require_valid()
    left: dict[str, list[str]] = {}
    with project.container(graph):  # opens the files that the process keeps for good
        pass
    for name in graph.topological_order(["trainer"]):
        kind = graph.nodes[name].spec.cls
        if not hasattr(kind, "open"):
            continue
        opening, before = kind.open, _list_resources()

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
        left[name] = sorted({*_list_resources()} - {*before})
    return left


def _list_resources() -> list[str]:
    """List open files and threads of this process."""
    return _list_files() + [f"thread {thread.name}" for thread in threading.enumerate()]


def test_a_failed_open_leaves_nothing_open(folder: Path) -> None:
    """If a node fails to open, no file, thread or lock of any node is left."""
    [left] = run_ranks(_open_with_failing_nodes, 1, folder, variables=False)
    assert len(left) > 12 and {"folder", "checkpoint", "data", "stages"} <= left.keys()
    assert {name: resources for name, resources in left.items() if resources} == {}


def test_a_changed_corpus_is_refused(folder: Path) -> None:
    """The error names the old and the new row count, and --accept-changes resumes."""
    common = (*TINY, "trainer.steps=4")
    assert drawloom(folder, *common)[0].code == 0
    (folder / "corpus/part3.py").unlink()
    again = (*TINY, "trainer.steps=4", "data.prefetch=3")
    refused = drawloom(folder, *again)[0]
    assert refused.code == 2 and "the corpus is not the one that this run began with: train had " in refused.text
    accepted = drawloom(folder, *again, "--accept-changes")[0]
    assert accepted.code == 0 and "warning: the corpus is not the one" in accepted.text


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_a_diverged_run_stops_and_keeps_a_finite_checkpoint(folder: Path, norm: str) -> None:
    """
    A diverged run stops after `max_skipped_steps` in a row and keeps the newest checkpoint with a finite loss.

    Checkpoints record skipped steps even if the host learns of the skip one step later.
    """
    words = (
        "optimizer.lr=1e30",
        "clip.max_norm=1e30",
        "trainer.max_skipped_steps=6",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        f"sync_gradients.norm={norm}",
    )
    outcome = drawloom(folder, *TINY, *words)[0]
    assert outcome.code == 1 and "6 steps in a row were skipped, at last step 7: " in outcome.text
    assert [row.get("skipped", False) for row in rows(folder / "runs/tiny")] == [False, *[True] * 6]
    saved = [step_of_checkpoint(path) for path in list_checkpoints(folder / "runs/tiny/checkpoints")]
    assert saved == [1, 5, 6, 7]  # the newest with a finite loss, the one that was evaluated, and the newest two
    for path in list_checkpoints(folder / "runs/tiny/checkpoints"):
        values = json.loads((path / "manifest.json").read_text())["values"]
        assert (values["loss"] is not None) == (step_of_checkpoint(path) == 1)
        weights = load_node_state(path, "stages").values()
        assert all(bool(torch.isfinite(weight).all()) for weight in weights if isinstance(weight, torch.Tensor))


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_a_run_that_learns_nothing_ends_in_words(folder: Path, norm: str) -> None:
    """A run with a learning rate of 1000 ends after ten steps, without an export or a sample."""
    words = ("optimizer.lr=1000", "trainer.steps=40", "checkpoint.every=5", f"sync_gradients.norm={norm}")
    outcome = drawloom(folder, *TINY, *words)[0]
    assert outcome.code == 1 and "training has diverged: since step 2 the loss was above 16." in outcome.text
    run = folder / "runs/tiny"
    assert len(rows(run)) in (10, 11) and not (run / "export").exists() and not (run / "sample.txt").exists()
    assert max(step_of_checkpoint(path) for path in list_checkpoints(run / "checkpoints")) < 11


def test_a_port_in_use_is_an_error(folder: Path) -> None:
    """Processes started without torchrun on a port in use end within the timeout."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        words = (*TINY, "batch.micro_size=2", "processes.timeout=2")
        [outcome] = run_ranks(_run_with_variables, 1, folder, words, launch, variables=False)
    assert outcome.code == 1 and "did not reach all 2 ranks" in outcome.text and "Traceback" not in outcome.text


def _run_with_variables(folder: Path, arguments: Sequence[str], variables: dict[str, str]) -> Outcome:
    """Run with these environment variables."""
    os.environ |= variables
    return command(folder, arguments, None)


CRASHING = """import ctypes, resource
from drawloom import component
resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), ctypes.string_at(0)

@component
class Rate:
    pass
"""


def test_a_crash_of_c_code_prints_the_line_that_called_it(tmp_path: Path) -> None:
    """A segmentation fault is reported with the file and line in Python, and not by its name alone."""
    (tmp_path / "crashing.py").write_text(CRASHING, "utf-8")
    words = [sys.executable, "-m", "drawloom", "check", "first_run", "lr.use=crashing", "--import", "crashing"]
    environment = {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path)]), "PATH": os.environ["PATH"]}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert f'File "{tmp_path}/crashing.py", line 3' in done.stderr
