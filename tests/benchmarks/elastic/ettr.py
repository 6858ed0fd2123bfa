"""
Effective training time ratio (ETTR) under kills: `make bench-ettr`, or with arguments RANKS SECONDS MODES...

A small run on the CPU loses a random process by SIGKILL every 30 s, also rank 0, and the launcher starts it again. With
`continue`, processes.on_failure is "continue"; with `restart`, all processes start again from the newest checkpoint.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.survival import find_worker, write_recipe

INTERVAL = 30.0  # seconds between two kills
STOP_LIMIT = 60.0  # seconds for the run to end after SIGTERM
WORDS = ("trainer.steps=1000000", "checkpoint.every=200", "metrics.recovery.use=metrics.recovery")


def measure(ranks: int, seconds: float, mode: str, seed: int = 0) -> dict[str, Any]:
    """Return the run's entry in `drawloom runs`, with the number of kills and the machine's load."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_recipe(Path(name))
        start = [sys.executable, "-m", "drawloom"]
        words = (*WORDS, *(["processes.on_failure=continue"] if mode == "continue" else []))
        launch = ["launch", "--nproc-per-node", str(ranks), "--max-restarts", "10000", "run", "recipe.toml", *words]
        choices, kills = random.Random(seed), 0
        with (
            (folder / "printed").open("wb") as printed,
            subprocess.Popen([*start, *launch], cwd=folder, stdout=printed, stderr=printed) as launcher,
        ):
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 and launcher.poll() is None:
                time.sleep(min(INTERVAL, left))
                if left > INTERVAL:
                    kills += _kill(launcher.pid, choices.randrange(ranks))
            launcher.terminate()
            launcher.wait(STOP_LIMIT)
        listing = subprocess.run(
            [*start, "runs", "runs", "--format", "json"], cwd=folder, capture_output=True, check=True
        )
        [entry] = json.loads(listing.stdout)["runs"]
        result: dict[str, Any] = {"kills": kills, "load": os.getloadavg()[1], **entry}
        return result


def _kill(launcher: int, rank: int) -> bool:
    """Kill a rank's process, and return whether there was one."""
    try:
        os.kill(find_worker(launcher, rank), signal.SIGKILL)
    except (AssertionError, OSError):  # it is being started again
        return False
    return True


def main(ranks: int = 2, seconds: float = 600.0, *modes: str) -> None:
    """Print the ratio and its parts for every mode."""
    for mode in modes or ("continue", "restart"):
        result = measure(ranks, seconds, mode)
        lost = {part: round(value, 1) for part, value in result["recovery_seconds"].items()}
        print(
            f"{ranks} processes, {mode}: ETTR {result['ettr']:.1%} in {seconds:g} s with {result['kills']} kills; step "
            f"{result['step']}; seconds lost by part {lost}; load {result['load']:.1f} on {os.cpu_count()} cores",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
