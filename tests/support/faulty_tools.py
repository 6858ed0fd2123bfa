"""Tools with faults, and one without."""

import os
import signal
import sys
import time
from pathlib import Path

from drawloom.components.environments.function_tool import tool


@tool
def echo(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * times


@tool
def fail(text: str) -> str:
    """Fail in the way named by a text."""
    match text:
        case "raise":
            raise LookupError("there is no such page")
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(99)
        case "fork":
            os.fork()
            time.sleep(99)
        case "slow":
            time.sleep(0.5)
        case "print":
            os.write(1, b"x" * 2**24)
            print("y" * 2**24)
        case "memory":
            return "z" * 2**30
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "parent killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(99)
        case "waits":
            Path("waiting").write_text(str(os.getpid()), "utf-8")
            time.sleep(99)
    return "fine"
