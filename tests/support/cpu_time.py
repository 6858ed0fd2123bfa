"""The CPU time of functions and programs."""

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any


def cpu_ms(function: Callable[[], Any], rounds: int = 9, at_most: float = 3.0) -> float:
    """Return the median of a few rounds in milliseconds; no round starts after `at_most` seconds."""
    times: list[float] = []
    while len(times) < rounds and sum(times) < at_most:
        gc.collect()
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def by_turns_ms(*functions: Callable[[], Any], rounds: int = 9) -> list[float]:
    """Return the median times of functions run in turns: other work on the machine slows all of them alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, milliseconds in zip(functions, times, strict=True):
            milliseconds.append(cpu_ms(function, rounds=1))
    return [statistics.median(milliseconds) for milliseconds in times]


def measure_median_wall_and_cpu_ms(command: Sequence[str], rounds: int = 3) -> tuple[float, float]:
    """Return a program's median wall and CPU time in milliseconds; its output is discarded."""
    walls, cpus = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command))
        walls.append(time.perf_counter() - began)
        cpus.append(used.ru_utime + used.ru_stime)
    return 1e3 * statistics.median(walls), 1e3 * statistics.median(cpus)
