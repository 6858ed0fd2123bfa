"""
Effective training time ratio (ETTR) under faults: `make bench NAME=ettr`, with ONLY="ranks seconds modes".

A run with steps of about half a second, on the CPU or with a GPU for each process, loses a random process every 30 s:
by SIGKILL, or by SIGSTOP. The mode `spare` has `processes.on_failure = "continue"` and a hot spare (`drawloom launch
--spares 1`), the mode `continue` has no spare, and with `restart` all processes start again from the newest checkpoint.
Figures are printed every minute, and before the run is stopped.

ETTR is a job's productive time divided by its wall-clock time; starts, and the work repeated after a fault, are not
productive (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025,
section II-D). There are two figures:

- `ETTR`, as the report has it: the steps' seconds as they were measured. This is stricter than the paper's, because the
  report and the copies in memory between two measurements do not count, and more generous, because a step counts in
  full if it was slow, such as a new process's first one.
- `at the undisturbed speed`: the number of steps, times the median seconds between undisturbed steps' lines in the log.
  Slow steps count as lost, and the work between steps does not. Another load on the machine distorts it.

After a mode, the medians of functions' seconds follow (`recovery_timings.py`), for processes that continue and for
spares: from the agreement or the admission until the first step, and in it.

`other` seconds are neither in steps nor in recoveries: the start, and the time between steps.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import attrs
import torch

from benchmarks.elastic.recovery_timings import format_median_timings
from drawloom.components.distributed.generation import Generation
from drawloom.components.distributed.launch_store import connect_to_launch_store
from drawloom.components.distributed.membership import CURRENT
from drawloom.components.distributed.torchrun import read_launch
from drawloom.components.report.ettr import TIME_FORMAT, compute_ettr
from drawloom.components.report.events import LOG, read_log
from drawloom.components.report.metrics import read_metrics
from support.runs import write_corpus

TIMINGS = Path(__file__).with_name("recovery_timings.py")
INTERVAL = 30.0  # seconds between two faults
PRINT_INTERVAL = 60.0
STOP_LIMIT = 60.0  # seconds for the run to end after SIGTERM
STORE_SECONDS = 5.0  # for the launch's store to answer
LINE = re.compile(r"(\S+ \S+) .*? drawloom\.run: step (\d+)/")
LINE_TIME = f"{TIME_FORMAT},%f"
LINE_STEPS = 10  # steps between two lines in the log
RECIPE = """
extends = "tiny.toml"
unset = ["checkpoint.best"]

[vars]
length = 128

[model]
num_hidden_layers = 4
hidden_size = 256
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 64
intermediate_size = 768

[trainer]
steps = 1000000
on_finish = []

[evaluate]
every = "never"

[metrics.recovery]
use = "metrics.recovery"

[listeners.timings]
use = "recovery_timings"
"""
ON_GPUS = (
    *("vars.length=1024", "model.num_hidden_layers=12", "model.hidden_size=1024", "model.num_attention_heads=16"),
    *("model.num_key_value_heads=16", "model.intermediate_size=3072", "precision.compute=bfloat16"),
)
"""About 150 million parameters."""

HAS_GPUS = torch.cuda.is_available()
MICRO_SIZE, MICROBATCHES = (8, 24) if HAS_GPUS else (2, 6)  # microbatches of every rank in a step
SURVIVING = ("processes.on_failure=continue", "checkpoint.every=100")
WORDS = {
    "spare": SURVIVING,
    "continue": SURVIVING,
    # `step`: seconds until a stopped process is noticed
    "restart": ("checkpoint.every=10", "listeners.timeouts.step=10"),
}


@attrs.define
class Run:
    """A launched run in a folder, and the faults that it has had."""

    folder: Path
    ranks: int
    mode: str
    random: random.Random
    faults: Counter[str] = attrs.field(factory=Counter)

    def measure(self, seconds: float) -> None:
        """Run for this time, and print the ratio every minute and at the end."""
        start = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", str(self.ranks)]
        spares = ["--spares", "1"] if self.mode == "spare" else []
        sizes = [f"batch.micro_size={MICRO_SIZE}", f"batch.global_size={MICRO_SIZE * MICROBATCHES * self.ranks}"]
        words = ["run", "recipe.toml", f"--import={TIMINGS}", *sizes, *(ON_GPUS if HAS_GPUS else ()), *WORDS[self.mode]]
        with (
            (self.folder / "printed").open("wb") as printed,
            subprocess.Popen(
                [*start, *spares, "--max-restarts", "10000", *words], cwd=self.folder, stdout=printed, stderr=printed
            ) as launcher,
        ):
            begin = time.monotonic()
            fault, report, end = begin + INTERVAL, begin + PRINT_INTERVAL, begin + seconds
            while time.monotonic() < end and launcher.poll() is None:
                time.sleep(0.1)
                if time.monotonic() > fault and end - time.monotonic() > INTERVAL / 2:
                    fault += INTERVAL
                    self._strike(launcher.pid)
                if time.monotonic() > report:
                    report += PRINT_INTERVAL
                    self._print(time.monotonic() - begin)
            self._print(time.monotonic() - begin)
            launcher.terminate()
            launcher.wait(STOP_LIMIT)
        if launcher.returncode != 128 + signal.SIGTERM:
            print(
                f"the launcher has ended with {launcher.returncode}:\n{(self.folder / 'printed').read_text()[-4000:]}"
            )

    def _strike(self, launcher: int) -> None:
        """Kill or stop one of the run's processes, unless they are being started."""
        members = self._find_members(launcher)
        if not members or (self.mode == "restart" and len(members) < self.ranks):
            self.faults["none"] += 1
            return
        kind = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
        self.faults[kind.name] += 1
        try:
            os.kill(self.random.choice(members), kind)
        except ProcessLookupError:
            self.faults["none"] += 1

    def _find_members(self, launcher: int) -> list[int]:
        """Return the run's processes, without waiting ones."""
        children = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        if self.mode == "restart" or not children:
            return children
        lines = Path(f"/proc/{children[0]}/environ").read_text().split("\0")
        launch = read_launch(dict(line.split("=", 1) for line in lines if "=" in line))
        store = connect_to_launch_store(launch.address, launch.port, launch.attempt, STORE_SECONDS)
        if not store.check([CURRENT]):
            return []
        return [member.pid for member in Generation.from_json(store.get(CURRENT).decode()).members]

    def _print(self, seconds: float) -> None:
        """Print the figures so far. Step lines are rare in the log, so that the time ends now instead of with it."""
        log, metrics = read_log(self.folder / "runs/tiny"), read_metrics(self.folder / "runs/tiny")
        log.last = time.strftime(TIME_FORMAT)
        name = f"{self.ranks} processes, {self.mode}, {seconds:.0f} s"
        if (ettr := compute_ettr(log, metrics)) is None:
            print(f"{name}: no step yet", flush=True)
            return
        lost = ", ".join(f"{part} {value:.1f}" for part, value in ettr.recovery_seconds.items())
        other = ettr.wall_seconds - ettr.productive_seconds - sum(ettr.recovery_seconds.values())
        count = len(metrics.steps)
        interval = measure_undisturbed_interval((self.folder / "runs/tiny" / LOG).read_text("utf-8"))
        print(
            f"{name}: ETTR {ettr.productive_time_fraction:.1%}, at the undisturbed speed "
            f"{count * interval / ettr.wall_seconds:.1%}; {dict(self.faults)}; "
            f"{count} steps of {ettr.productive_seconds / count:.3f} s (every {interval:.3f} s undisturbed) in "
            f"{ettr.wall_seconds:.0f} s; {ettr.lost_steps} steps lost; {ettr.recoveries} steps repeated in memory, "
            f"seconds: {lost or 'none'}, other {other:.1f}; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def measure_undisturbed_interval(log: str) -> float:
    """Return the median seconds from one step to the next, where nothing else was logged in between; 0 if unknown."""
    lines = [LINE.match(line) for line in log.splitlines()]
    return statistics.median(
        [
            (datetime.strptime(end[1], LINE_TIME) - datetime.strptime(start[1], LINE_TIME)).total_seconds() / LINE_STEPS
            for start, end in pairwise(lines)
            if start and end and int(end[2]) == int(start[2]) + LINE_STEPS
        ]
        or [0.0]
    )


def main() -> None:
    """Measure every mode after the other."""
    ranks, seconds, *modes = sys.argv[1:] or ("2", "600")
    for mode in modes or WORDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_corpus(folder, files=60)
            (folder / "recipe.toml").write_text(RECIPE, "utf-8")
            Run(folder, int(ranks), mode, random.Random(0)).measure(float(seconds))
            print(format_median_timings(folder), flush=True)


if __name__ == "__main__":
    main()
