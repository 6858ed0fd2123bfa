"""
A run under kills and stops at random moments, for the soak test.

The processes are started again one by one, as a launcher does, and join the run.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generation import Generation
from drawloom.components.distributed.membership import CURRENT
from drawloom.components.phases.forward_backward import ForwardBackward
from support.mutations import put
from support.processes import Crew
from support.runs import Outcome, command

STUCK = 60.0  # seconds without a new step
HEARTBEAT = 3.0  # seconds; processes start within a second, because a fork server has imported torch
HELPERS = 5.0  # seconds for helpers of ended processes to end
MAX_PAUSE = 1.0  # seconds between a new step and the next fault


@attrs.define
class Findings:
    """
    Faults by kind, and seconds from a fault to the next finished step, which may repeat one.

    `returns` has the numbers of steps lost with two neighbours, when the run continues from a checkpoint. `stuck` is a
    run's state without progress, and `orphans` are process groups left at the end. `codes` are exit codes, or the text
    of a failure for a killed process.
    """

    faults: Counter[str] = attrs.field(factory=Counter)
    kills: list[float] = attrs.field(factory=list)
    stops: list[float] = attrs.field(factory=list)
    returns: list[int] = attrs.field(factory=list)
    generations: int = 0
    steps: int = 0
    stuck: str = ""
    orphans: list[int] = attrs.field(factory=list)
    codes: list[Any] = attrs.field(factory=list)

    def __str__(self) -> str:
        kills, stops = sorted(self.kills), sorted(self.stops)
        return (
            f"{dict(self.faults)}, {self.generations} generations, {self.steps} steps; seconds to the next step after "
            f"kills: {_quantiles(kills)}; after stops: {_quantiles(stops)}; steps lost: {self.returns}; {self.stuck}"
        )


def _quantiles(values: list[float]) -> str:
    """Return the median, the 95th percentile and the maximum of sorted values."""
    if not values:
        return "none"
    return ", ".join(f"{values[min(len(values) - 1, int(len(values) * part))]:.2f}" for part in (0.5, 0.95, 1))


def run_slowly(folder: Path, words: tuple[str, ...]) -> Outcome:
    """Run a process whose steps take a tenth of a second longer, so faults meet every part of a step."""
    method = ForwardBackward.run_phase

    def slow(self: Any, step: Any) -> None:
        time.sleep(0.1)
        method(self, step)

    put(ForwardBackward, "run_phase", slow)
    return command(folder, ("run", "recipe.toml", f"processes.heartbeat_timeout={HEARTBEAT}", *words), None)


@attrs.define
class Soak:
    """The faults of one run: which process gets which, and how long the others take."""

    folder: Path
    crew: Crew
    random: random.Random
    width: int  # ranks in a replica
    findings: Findings = attrs.field(factory=Findings)

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.folder / "runs/tiny/metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(lines[-1].partition(b'"step": ')[2].partition(b",")[0] or 0) if lines else 0

    def run(self, faults: int, seconds: float) -> Findings:
        """Make faults until they are enough or time is over, and then end the run."""
        end = time.monotonic() + seconds
        self._await_step(3)
        while self.findings.faults.total() < faults and time.monotonic() < end and not self.findings.stuck:
            self._pause(self.random.uniform(0, MAX_PAUSE))
            self._strike()
        self.findings.steps = self.step
        self._end()
        return self.findings

    def _members(self) -> list[list[int]]:
        """Return the process ids of each complete replica in the newest generation."""
        store = PrefixStore("drawloom/", self.crew.store)
        if not store.check([CURRENT]):
            return []
        generation = Generation.from_json(store.get(CURRENT).decode())
        self.findings.generations = generation.number
        live = {process.pid for process in self.crew.processes.values() if process.is_alive()}
        pids = [member.pid for member in generation.members]
        replicas = [pids[start : start + self.width] for start in range(0, len(pids), self.width)]
        return [replica for replica in replicas if live >= {*replica}]

    def _strike(self) -> None:
        """
        Kill or stop a member, perhaps another one while the others recover, or kill a joining process.

        One complete replica is spared, because the run ends without any.
        """
        replicas = self._members()
        others = [process.pid for process in self.crew.processes.values() if process.is_alive()]
        newcomers = [pid for pid in others if pid is not None and all(pid not in replica for replica in replicas)]
        if newcomers and self.random.random() < 0.2:
            self.findings.faults["newcomer killed"] += 1
            os.kill(self.random.choice(newcomers), signal.SIGKILL)
            return
        if len(replicas) < 2:
            return
        replicas.pop(self.random.randrange(len(replicas)))
        members = [pid for replica in replicas for pid in replica]
        before, start = self.step, time.monotonic()
        self.random.shuffle(members)
        stops = self.random.random() < 0.15
        self.findings.faults["stopped" if stops else "killed"] += 1
        os.kill(members.pop(), signal.SIGSTOP if stops else signal.SIGKILL)
        if members and self.random.random() < 0.3:
            self._pause(self.random.uniform(0, 1))
            if self.step <= before + 1:  # the others still recover
                self.findings.faults["killed while the others recover"] += 1
                os.kill(members.pop(), signal.SIGKILL)
        self._await_step(before + 2, back_from=before)  # the one in progress may have been finished
        (self.findings.stops if stops else self.findings.kills).append(time.monotonic() - start)

    def _await_step(self, step: int, back_from: int = 0) -> None:
        """Wait until a step is finished, or one before `back_from`, which is then repeated with all others since."""
        end = time.monotonic() + STUCK
        while (last := self.step) < step and not self.findings.stuck:
            if 0 < last < back_from - 1:  # an interrupted step's line is removed just before it is written again
                self.findings.returns.append(back_from - last + 1)
                return
            self._pause(0.02)
            if time.monotonic() > end:
                self.findings.stuck = f"no step {step} in {STUCK:g} s"

    def _pause(self, seconds: float) -> None:
        """Wait, and restart ended processes."""
        end = time.monotonic() + seconds
        while True:
            for rank, process in self.crew.processes.items():
                if process.exitcode is not None and process.exitcode >= 0:
                    self.findings.stuck = f"rank {rank} ended with {process.exitcode}: {self.crew.result(rank)}"
            for rank in [rank for rank, process in self.crew.processes.items() if process.exitcode is not None]:
                self.crew.start(rank)
            if time.monotonic() >= end:
                return
            time.sleep(0.01)

    def _end(self) -> None:
        """Stop the run by SIGTERM, once all processes have joined again, and note what is left of it."""
        end = time.monotonic() + STUCK
        while len(self._members()) * self.width < self.crew.world_size and time.monotonic() < end:
            self._pause(0.1)
        self._await_step(self.step + 3)
        members = [pid for replica in self._members() for pid in replica]
        for process in self.crew.processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
        for rank, process in self.crew.processes.items():
            process.join(STUCK)
            if process.pid in members and process.exitcode is not None:
                result = self.crew.result(rank)  # the text of a failure, if the process was killed
                self.findings.codes.append(result.code if isinstance(result, Outcome) else result)


def soak(
    folder: Path, ranks: int, width: int, words: tuple[str, ...], faults: int, seed: int, seconds: float
) -> Findings:
    """Run the recipe in `folder`, with replicas of `width` ranks, under so many faults, or for so many seconds."""
    with Crew(run_slowly, ranks, folder, words) as crew:
        findings = Soak(folder, crew, random.Random(seed), width).run(faults, seconds)
        end = time.monotonic() + HELPERS
        while (orphans := crew.groups_left()) and time.monotonic() < end:
            time.sleep(0.1)
        findings.orphans = orphans
    return findings
