"""
CPU threads of a process: how many compute, and whether those that wait for one another give up their cores.

The module imports next to nothing: it is used before torch is imported, which reads these variables then.
"""

import math
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
"""The variable that torch and its libraries take the number of threads from."""

SPINS = "GOMP_SPINCOUNT"
"""libgomp's variable: how often a thread looks for the others before it sleeps, 300,000 times by default."""

FEW_SPINS = "100"

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container, whose own control group is the root of those that it sees."""


def usable_cores(quota: Path = QUOTA) -> int:
    """Return the number of cores in this process's affinity, or those of its control group's quota if it has fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # without control groups, or with "max" for the quota
        microseconds, period = map(int, quota.read_text().split())
        cores = min(cores, math.ceil(microseconds / period))
    return max(1, cores)


def threads_of_process(processes: int) -> int:
    """Return the number of threads for each of several processes on the usable cores."""
    return max(1, usable_cores() // processes)


def sleep_on_busy_machine(environment: MutableMapping[str, str], load: float) -> None:
    """
    Set the variable by which waiting threads sleep soon, if other programs keep a core busy; results don't change.

    Threads that wait by spinning take cores from the ones that they wait for. Measured for a model of 1 MB on two cores
    with a load of 10: one thread 15 passes/s, two threads 1.3, and 12 with few spins. On idle cores spinning is faster.
    """
    if load >= 1 and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(SPINS, FEW_SPINS)
