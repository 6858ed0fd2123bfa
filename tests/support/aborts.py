"""Runs in which one rank fails in some way, and the output of all ranks."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, command

LONG = ("run", "tiny.toml", "batch.global_size=6", "batch.micro_size=1", "trainer.steps=1000000")
RUN = (*LONG, "checkpoint.every='last'", "evaluate.every='never'", "trainer.on_finish=[]")
WHERE = "step 4, phase [forward_backward]"
"""Where rank 1 fails."""


def _refuse() -> None:
    raise UserError("there is no luck today", exit_code=2)


FAULTS: dict[str, Callable[[], object]] = {
    "refuse": _refuse,
    "refuse and hang": _refuse,
    "fault": lambda: 1 / 0,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""Rank 1's action. `refuse and hang` also hangs while closing."""


def _run_until_rank_1_fails(folder: Path, arguments: Sequence[str], fault: str) -> Outcome:
    """Run a process in which rank 1 fails or hangs at step 4."""
    run, is_rank_1 = ForwardBackward.run_phase, os.environ["RANK"] == "1"
    if fault == "refuse and hang" and is_rank_1:
        put(ForwardBackward, "close", lambda _: time.sleep(60))

    def failing(self: ForwardBackward, step: Step) -> None:
        if step.index == 4 and is_rank_1:
            (folder / "failed").touch()
            FAULTS[fault]()
        run(self, step)

    put(ForwardBackward, "run_phase", failing)
    return command(folder, arguments, None)


def run_with_fault(
    folder: Path, ranks: int, fault: str, *words: str
) -> tuple[dict[int, str], dict[int, Outcome], float]:
    """Return how ranks died, how they ended, and the seconds until all but a stopped one had ended."""
    lost = {1} if fault == "stop" else set()
    try:
        results = run_ranks(_run_until_rank_1_fails, ranks, folder, (*RUN, *words), fault, timeout=60, lost=lost)
        failures, values = {}, dict(enumerate(results))
    except RanksFailedError as failed:
        failures, values = failed.failures, failed.values
    return failures, values, time.time() - (folder / "failed").stat().st_mtime


def output_lines(outcomes: dict[int, Outcome]) -> list[str]:
    """Return all ranks' output without the header, steps, memory, and warnings about the recipe."""
    lines = [line for outcome in outcomes.values() for line in outcome.text.splitlines()]
    return [
        line
        for line in lines
        if not line.startswith(("step ", "memory ", "run ", "model ", "data ", "device ", "length "))
        and ": warning: [" not in line
    ]
