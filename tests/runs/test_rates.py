"""Rates and times of runs with slow ranks, compared with a clock of the test's own."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.processes import run_ranks
from support.runs import Outcome, command, rows, write_corpus

FILES = {
    "__init__": """
import json, os, time

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

def sleep(seconds, turn=0):
    time.sleep(seconds * (1.0 if (RANK + turn) % RANKS == 0 else 0.2))

def note(name, step):
    with open(f"times-{RANK}", "a") as file:
        file.write(json.dumps([name, step, time.monotonic()]) + "\\n")
""",
    "loader": """
from drawloom.components.data.loader import Loader

@component
class SlowLoader(Loader):
    def next_step(self):
        sleep(0.03, 1)
        return super().next_step()
""",
    "validation": """
from drawloom.components.data.validation import Validation

@component(impact="safe")
class SlowValidation(Validation):
    def batches(self):
        sleep(0.06, 2)
        return super().batches()
""",
    "phase": """
@component(impact="safe")
class Phase:
    name: str
    turn: int = -1

    def run_phase(self, step):
        if self.turn >= 0:
            sleep(0.04, self.turn)
        note(self.name, step.index)

    def state_dict(self):
        sleep(0.02, self.turn)
        return {}

    def load_state_dict(self, state):
        pass
""",
    "skip": """
@component(changes=("skip",))
class Skip:
    def run_phase(self, step):
        if step.index == 3:
            step.skip("it is the third")
""",
    "watch": """
@component(impact="safe")
class Watch:
    observes = ("step_started",)

    def on_event(self, event):
        note("started", event.step.index)

    def track(self, step, values):
        note("tracked", step)

    def rewind(self, step):
        pass
""",
}
"""A package of components, mostly slow on one rank and less slow on the others."""

PHASES = {
    "first": ["forward_backward"],
    "a": ["sync_gradients"],
    "b": ["divergence", "skip", "clip"],
    "c": ["lr", "optimizer"],
    "d": ["before_evaluation", "evaluate", "after_evaluation"],
    "e": ["report"],
    "f": ["garbage_collection"],
    "g": ["before_saving", "checkpoint", "after_saving"],
    "last": [],
}
"""Phases after every slow one."""

RECIPE = f"""
extends = "./tiny.toml"

[data]
use = "slow.loader"

[validation]
use = "slow.validation"

[skip]
use = "slow.skip"

[trackers.watch]
use = "slow.watch"

[evaluate]
every = 2
at_start = true

[checkpoint]
every = 3

[report]
every = 2

[metrics.utilization]
peak_tflops = 1000.0

[trainer]
steps = 5
on_finish = []
phases = [{", ".join(f'"@{name}"' for slow, names in PHASES.items() for name in (slow, *names))}]
""" + "".join(
    f'\n[{name}]\nuse = "slow.phase"\nname = "{name}"\nturn = {turn}\n'
    for turn, name in [
        *enumerate(PHASES, 3),  # rank 0, whose clock counts, is not the last one before an evaluation
        *((-1, name) for names in PHASES.values() for name in names if name.startswith(("before", "after"))),
    ]
)


def run_twice(folder: Path, ranks: int) -> list[Outcome]:
    """Run five steps, and resume the run for three more, in one process of each rank."""
    words = ("run", "rates.toml", "--import", "slow", f"mesh.data_shard={ranks}", "batch.micro_size=1")
    return [command(folder, (*words, "--accept-changes", f"trainer.steps={steps}"), None) for steps in (5, 8)]


def read_times(folder: Path, ranks: int) -> Callable[[str, int], float]:
    """Return a function of an event and a step: the time when the last rank has reached it."""
    times: dict[Any, list[float]] = defaultdict(list)
    for rank in range(ranks):
        for line in (folder / f"times-{rank}").read_text("utf-8").splitlines():
            name, step, time = json.loads(line)
            times[name, step].append(time)
    return lambda name, step: max(times[name, step])


# Two ranks have the phases of one, and 4 ranks on 2 cores wait long.
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 4))])
def test_rates_times_wall_time_are_tokens(tmp_path: Path, ranks: int) -> None:
    """
    Every phase is slow on another rank, and so are loader, evaluation and saves; a step is skipped, the run resumed.

    The oracle is a clock read by phases beside evaluation and checkpoint, and by a tracker. All parts of a step add up
    to it.
    """
    write_corpus(tmp_path)
    (tmp_path / "slow").mkdir()
    for name, text in FILES.items():
        head = "" if name == "__init__" else "from drawloom import component\nfrom slow import note, sleep\n"
        (tmp_path / "slow" / f"{name}.py").write_text(head + text, "utf-8")
    (tmp_path / "rates.toml").write_text(RECIPE, "utf-8")
    for outcomes in run_ranks(run_twice, ranks, tmp_path, ranks, timeout=240, variables=ranks > 1):
        assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.text for outcome in outcomes]
    at, tracked = read_times(tmp_path, ranks), rows(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in tracked] == [*range(1, 9)] and tracked[2]["skipped"]
    total_tokens = [0, *(row["tokens"] for row in tracked)]
    for first, last in ((1, 5), (6, 8)):
        steps = range(first, last + 1)
        asides = [("evaluation", step) for step in steps if step % 2 == 0 or step == last]
        asides += [("saving", step) for step in steps if step % 3 == 0 and step < last]
        excluded = sum(at(f"after_{name}", step) - at(f"before_{name}", step) for name, step in asides)
        wall = at("tracked", last) - at("started", first)
        of_run = tracked[first - 1 : last]
        tokens = [after - before for before, after in pairwise(total_tokens[first - 1 : last + 1])]
        seconds = [number / row["tokens_per_second"] for number, row in zip(tokens, of_run, strict=True)]
        assert sum(seconds) == pytest.approx(wall - excluded, rel=0.03)
        assert sum(row["seconds/step"] for row in of_run) == pytest.approx(wall, rel=0.03)
        for row, number, time in zip(of_run, tokens, seconds, strict=True):
            parts = {name: row[name] for name in row if name.startswith("seconds/")}
            whole, aside = parts.pop("seconds/step"), parts.pop("seconds/excluded", 0.0)
            assert sum(parts.values()) == pytest.approx(whole) and whole - aside == pytest.approx(time)
            assert parts["seconds/data"] >= 0.006 and {"seconds/other", "seconds/report"} < parts.keys()
            if ranks > 1:
                assert row["device_tokens_per_second"] == pytest.approx(number / time / ranks)
            assert 0 < row["mfu"] < 1
