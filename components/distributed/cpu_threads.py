"""
CPU threads: their number, and whether waiting threads give up their cores.

The module imports almost nothing, because it runs before torch's import, which reads these variables.
"""

import math
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
"""The variable from which torch and its libraries read the number of threads."""

SPINS = "GOMP_SPINCOUNT"
"""libgomp's variable: the number of times that a waiting thread polls before it sleeps, by default 300,000."""

FEW_SPINS = "100"

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container, which sees its own control group as the root."""


def count_usable_cores(quota: Path = QUOTA) -> int:
    """Return the number of cores in this process's affinity, or of its control group's quota if it is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # without control groups, or with "max" for the quota
        microseconds, period = map(int, quota.read_text().split())
        cores = min(cores, math.ceil(microseconds / period))
    return max(1, cores)


def count_threads_per_process(processes: int) -> int:
    """Return the thread count per process for `processes` processes on the usable cores."""
    return max(1, count_usable_cores() // processes)


def shorten_thread_spinning(environment: MutableMapping[str, str], load: float) -> None:
    """
    If other programs keep a core busy, let waiting threads sleep soon by setting GOMP_SPINCOUNT; results don't change.

    Spinning threads take cores from the threads they wait for. Measured for a model of 1 MB on two cores with a load of
    10: one thread 15 passes/s, two threads 1.3, and 12 with few spins. On idle cores spinning is faster.
    """
    if load >= 1 and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(SPINS, FEW_SPINS)
