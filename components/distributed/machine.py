"""Which machine this is, for processes that look at one another."""

import os
from pathlib import Path


def machine() -> str:
    """What all processes that can open one another's memory have in common: the running system and its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
