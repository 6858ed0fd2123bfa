"""
Runs that are killed at random moments, repeatedly, until they complete.

One process imports everything and forks each life of a run. A life reports in shared memory its phase, its restored
step, and the newest step it has certainly committed.
"""

import contextlib
import gc
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from drawloom.components.checkpoint import commit as writing
from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.snapshot import ShardPlan
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.ports.run import Step
from drawloom.components.run.trainer import Trainer
from drawloom.components.storage import durable_files
from drawloom.graph.cli.main import main
from drawloom.graph.project import Project
from support.crashes import is_valid
from support.mutations import MUTATIONS, put
from support.runs import write_corpus

STEPS = 30
KEEP = 2
PHASES = ("start", "load", "train", "copy", "write", "commit", "rename", "rotate", "end")
SURVIVOR = 2.0  # seconds in which a rank notices that another is gone
STUCK = 10.0  # seconds after which it never will: how late it was is part of the findings until then
NUMBERS = struct.Struct("=BBhh")  # for each rank: main thread's phase, another thread's, restored, committed
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


@attrs.frozen
class Job:
    """A run to be killed: its processes, its staging, its mutation, if any, and its mesh sizes: (name, ranks)."""

    ranks: int
    staging: str
    mutation: str = "nothing"
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        mesh = "-".join(f"{name}{size}" for name, size in self.mesh)
        return f"{self.ranks}-{mesh}-{self.staging}-{self.mutation}"

    def command(self, name: str) -> list[str]:
        """Return a user's command line."""
        return [
            *("run", "tiny.toml", f"run.name={name}", f"trainer.steps={STEPS}", "trainer.on_finish=[]"),
            *("checkpoint.every=3", f"checkpoint.keep={KEEP}", "evaluate.every=7"),
            *(f"mesh.{name}={size}" for name, size in self.mesh),
            f"model.num_hidden_layers={dict(self.mesh).get('pipeline', 1)}",
            "model.num_key_value_heads=2",
            f"batch.micro_size={2 if self.ranks < 4 else 1}",
            f"staging.use=checkpoint.staging.{self.staging}",
        ]


@attrs.define
class Findings:
    """The results of a soak: kills by phase, and every failed check, as text."""

    kills: Counter[str] = attrs.field(factory=Counter)
    finished: int = 0
    different: list[str] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)
    torn: list[str] = attrs.field(factory=list)
    grown: list[str] = attrs.field(factory=list)
    stuck: list[str] = attrs.field(factory=list)
    slowest: float = 0.0

    @property
    def found(self) -> bool:
        """Whether any check failed."""
        return bool(self.different or self.lost or self.torn or self.grown or self.stuck)

    def add(self, other: "Findings") -> None:
        """Merge other findings into these."""
        self.kills += other.kills
        self.finished += other.finished
        self.slowest = max(self.slowest, other.slowest)
        for name in ("different", "lost", "torn", "grown", "stuck"):
            getattr(self, name).extend(getattr(other, name))


def soak(folder: Path, jobs: list[Job], kills: int, seed: int, seconds: float, wanted: str = "") -> Findings:
    """
    Kill runs of these jobs in turn, for this many kills or seconds, or until the wanted kind of fault appears; then
    complete the last ones. Runs in a separate process.
    """
    os.chdir(folder)
    write_corpus(folder)
    _warm()
    findings, moments, end = Findings(), random.Random(seed), time.monotonic() + seconds
    straight = {job: _run_uninterrupted(job) for job in {attrs.evolve(job, mutation="nothing") for job in jobs}}
    number = 0
    while findings.kills.total() < kills and time.monotonic() < end and not getattr(findings, wanted or "found"):
        for job in jobs:
            number += 1
            expected, length = straight[attrs.evolve(job, mutation="nothing")]
            findings.add(_kill_until_done(job, f"{job.name}-{number}", expected, length, moments))
    return findings


def crash_loop(folder: Path, job: Job, times: int, seed: int) -> Findings:
    """
    Kill a run after a commit, then repeatedly before its next commit, and at last complete it. Runs in a separate
    process.
    """
    os.chdir(folder)
    write_corpus(folder)
    _warm()
    moments, findings, name, run = random.Random(seed), Findings(), "looping", Path("runs/looping")
    expected, length = _run_uninterrupted(job)
    life = _Life(job, name)
    while not life.last_commit():
        time.sleep(0.001)
    life.kill(range(job.ranks))
    committed, longest = life.last_commit(), length / 3
    for _ in range(times):
        life = _Life(job, name)
        if life.end_by_itself(moments.uniform(0.0, longest)) is None:
            findings.kills[life.phase()] += 1
            life.kill(range(job.ranks))
        if life.last_commit():
            longest /= 2  # it was no crash loop: this one came further than the last commit
        _check_life(name, run, life, committed, findings)
        committed = max(committed, life.last_commit())
    last = _Life(job, name)
    if last.end_by_itself(60.0) != [0] * job.ranks or _result(run) != expected:
        findings.different.append(f"{name}: {Path(f'printed-{name}-0').read_text()[-500:]}")
    _check_life(name, run, last, committed, findings)
    findings.finished += 1
    return findings


def _warm() -> None:
    """Import all modules of a run, so that forks have them at once."""
    import torch._dynamo

    torch.set_num_threads(1)
    project = Project.from_package("drawloom")
    for job in (Job(1, "blocking"), Job(1, "overlapped"), Job(1, "none")):
        project.graph(project.load("tiny.toml", [], job.command("warm")[2:])).require_valid()
    gc.collect()
    gc.freeze()


def _run_uninterrupted(job: Job) -> tuple[bytes, float]:
    """Return the result of an uninterrupted run, and its duration."""
    began = time.monotonic()
    life = _Life(job, job.name)
    if life.end_by_itself(60.0) != [0] * job.ranks:
        raise RuntimeError(Path(f"printed-{job.name}-0").read_text())
    return _result(Path("runs") / job.name), time.monotonic() - began


def _kill_until_done(job: Job, name: str, expected: bytes, length: float, moments: random.Random) -> Findings:
    findings, committed, run = Findings(), 0, Path("runs") / name
    for _ in range(100):
        life = _Life(job, name)
        codes = life.end_by_itself(moments.uniform(0.05, length))
        if codes is None:
            findings.kills[life.phase()] += 1
            alone = job.ranks > 1 and moments.random() < 0.4 and life.has_all_ranks()
            _kill(life, moments.randrange(job.ranks) if alone else None, findings)
        elif codes != [0] * job.ranks:
            findings.different.append(f"{name}: exit codes {codes}: {Path(f'printed-{name}-0').read_text()[-500:]}")
            break
        _check_life(name, run, life, committed, findings)
        committed = max(committed, life.last_commit())
        if codes is not None:
            findings.finished += 1
            if _result(run) != expected:
                findings.different.append(f"{name}: {_difference(_result(run), expected)}")
            break
    shutil.rmtree(run, ignore_errors=True)
    return findings


def _kill(life: "_Life", only: int | None, findings: Findings) -> None:
    """Kill all ranks, or one; then the others must end by themselves, with an error."""
    if only is None:
        life.kill(range(len(life.children)))
        return
    began = time.monotonic()
    life.kill([only])
    codes = life.end_by_itself(STUCK)
    findings.slowest = max(findings.slowest, time.monotonic() - began)
    if codes is None:
        findings.stuck.append(f"{life.name}: rank {only} was killed, and the other was still there after {STUCK:g} s")
        life.kill(range(len(life.children)))


def _check_life(name: str, run: Path, life: "_Life", committed: int, findings: Findings) -> None:
    """Check a life's restored step, and the checkpoints it left."""
    for rank, restored in enumerate(life.steps_restored()):
        if restored not in (-1,) and restored < committed:
            findings.lost.append(f"{name}: rank {rank} restored step {restored}, and {committed} was committed")
    if not (run / "checkpoints").is_dir():
        return
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    steps = [path for path in left if path.startswith("step-")]
    if not all(is_valid(run / "checkpoints" / path) for path in steps):
        findings.torn.append(f"{name}: of {left} one is not whole")
    newest = max((int(path.removeprefix("step-")) for path in steps), default=0)
    if newest < life.last_commit():
        findings.lost.append(f"{name}: step {life.last_commit()} was committed, and {left} is left")
    if len(left) > KEEP + 2:
        findings.grown.append(f"{name}: {left}")


def _result(run: Path) -> bytes:
    """Return everything to compare bitwise: every step's metrics, and every file of the last checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = json.dumps([[row.get(name) for name in SAME] for row in rows]).encode()
    last = sorted((run / "checkpoints" / f"step-{STEPS}").glob("rank-*"))
    return b"\n".join([numbers, *(path.name.encode() + b" " + path.read_bytes() for path in last)])


def _difference(first: bytes, second: bytes) -> str:
    lines = zip(first.split(b"\n"), second.split(b"\n"), strict=False)
    difference = next(
        ((line, other_line) for line, other_line in lines if line != other_line), (first[-50:], second[-50:])
    )
    return f"{difference[0][:2000]!r} instead of {difference[1][:2000]!r}"


class _Life:
    """Some processes of a run, from their start until they end or are killed."""

    def __init__(self, job: Job, name: str) -> None:
        self.name = name
        self._memory = mmap.mmap(-1, NUMBERS.size * job.ranks)
        for rank in range(job.ranks):
            NUMBERS.pack_into(self._memory, rank * NUMBERS.size, 0, 0, -1, 0)
        port = _free_port()
        self.children = [self._fork(job, rank, port) for rank in range(job.ranks)]
        self._codes: dict[int, int] = {}

    def end_by_itself(self, seconds: float) -> list[int] | None:
        """Wait up to this long for all processes to end; return their exit codes, or None if one has not ended."""
        end = time.monotonic() + seconds
        while len(self._codes) < len(self.children):
            for child in self.children:
                if child not in self._codes:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        self._codes[child] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                break
            time.sleep(0.002)
        done = len(self._codes) == len(self.children)
        return [self._codes[child] for child in self.children] if done else None

    def kill(self, ranks: Any) -> None:
        """Kill these ranks by SIGKILL, and wait for them."""
        for child in [self.children[rank] for rank in ranks]:
            if child not in self._codes:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                self._codes[child] = os.waitstatus_to_exitcode(status)

    def phase(self) -> str:
        """Return the phase of rank 0, or of its background thread if it is writing."""
        main_thread, background_thread, *_ = NUMBERS.unpack_from(self._memory, 0)
        return PHASES[background_thread or main_thread]

    def has_all_ranks(self) -> bool:
        """Whether all ranks have joined; before, they wait for a dead rank as for a late one."""
        return all(self._memory[rank * NUMBERS.size] for rank in range(len(self.children)))

    def steps_restored(self) -> list[int]:
        """Return each rank's restored step, -1 if none."""
        return [NUMBERS.unpack_from(self._memory, rank * NUMBERS.size)[2] for rank in range(len(self.children))]

    def last_commit(self) -> int:
        """Return the newest step certainly committed in this life."""
        return int(NUMBERS.unpack_from(self._memory, 0)[3])

    def _fork(self, job: Job, rank: int, port: int) -> int:
        child = os.fork()
        if child:
            return child
        code = 70
        with contextlib.suppress(BaseException):
            code = _live(job, self.name, rank, port, _Watch(self._memory, rank * NUMBERS.size))
        os._exit(code)


def _live(job: Job, name: str, rank: int, port: int, watch: "_Watch") -> int:
    """Return the main function of one process."""
    if job.ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= address | {key: str(value) for key, value in numbers.items()}
    MUTATIONS[job.mutation]()
    watch.install()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(f"printed-{name}-{rank}", "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(file))
        stack.enter_context(contextlib.redirect_stderr(file))
        try:
            return main(job.command(name))
        except SystemExit as ended:
            return int(ended.code or 0)


@attrs.frozen
class _Watch:
    """A recorder in memory, readable by the process's killer."""

    memory: mmap.mmap
    place: int

    def install(self) -> None:
        """Wrap the functions to be recorded, and let training draw from every generator of the process."""
        for owner, name, phase in (
            (Checkpointer, "restore", "load"),
            (Trainer, "_run_step", "train"),
            (ShardPlan, "take_snapshot", "copy"),
            (writing, "write_files_of_rank", "write"),
            (writing, "commit_folder", "commit"),
            (durable_files, "rename_durably", "rename"),
            (writing, "remove_checkpoints", "rotate"),
            (Checkpointer, "close", "end"),
        ):
            put(owner, name, self._record_phase(getattr(owner, name), PHASES.index(phase)))
        restore, commit, synchronise = Checkpointer.restore, writing.commit_folder, Synchronize.run_phase

        def record_restore(checkpointer: Checkpointer) -> int:
            step = restore(checkpointer)
            self._set(2, step)
            return step

        def record_commit(temp: Path, checkpoint: Path, *rest: Any) -> None:
            commit(temp, checkpoint, *rest)
            self._set(3, int(checkpoint.name.removeprefix("step-")))

        def noisy(phase: Synchronize, step: Step) -> None:
            # Of every rank's generators, and the same on all: gradients have been summed already.
            drawn = torch.tensor(random.random() + np.random.random() + torch.rand(()).item(), dtype=torch.float64)
            phase.mesh.world.sum(drawn)
            for _, parameter in phase.parameters.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + drawn.item() / phase.mesh.world.size / 100)
            synchronise(phase, step)

        put(Checkpointer, "restore", record_restore)
        put(writing, "commit_folder", record_commit)
        put(Synchronize, "run_phase", noisy)

    def _record_phase(self, call: Callable[..., Any], phase: int) -> Callable[..., Any]:
        def recording(*arguments: Any, **named: Any) -> Any:
            with self._in(phase):
                return call(*arguments, **named)

        return recording

    @contextlib.contextmanager
    def _in(self, phase: int) -> Iterator[None]:
        field = 0 if threading.current_thread() is threading.main_thread() else 1
        before = self.memory[self.place + field]
        self.memory[self.place + field] = phase
        try:
            yield
        finally:
            self.memory[self.place + field] = before

    def _set(self, field: int, value: int) -> None:
        struct.pack_into("=h", self.memory, self.place + 2 * (field - 1), value)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
