"""Cost of starting: the graph layer's import compared with bare Python, and `check` compared with torch's import."""

import sys

from support.cpu_time import measure_median_wall_and_cpu_ms

PROGRAMS = {
    "python": ["-c", ""],
    "import drawloom.graph": ["-c", "import drawloom.graph"],
    "import torch": ["-c", "import torch"],
    "drawloom check first_run": ["-m", "drawloom", "check", "first_run"],
}


def main() -> None:
    """Print a row per program."""
    print(f"{'':26} {'wall ms':>8} {'CPU ms':>8}")
    for name, arguments in PROGRAMS.items():
        wall, cpu = measure_median_wall_and_cpu_ms([sys.executable, *arguments])
        print(f"{name:26} {wall:>8.0f} {cpu:>8.0f}", flush=True)
