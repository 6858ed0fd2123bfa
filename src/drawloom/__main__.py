"""python -m drawloom."""

import os
import signal
import sys
from types import FrameType
from typing import Any


def main() -> int:
    """Take care of how this process may end, and then run the command line, whose imports take seconds."""
    parent = os.getppid()
    _handle(signal.SIGTERM, _end)
    _handle(signal.SIGINT, _interrupt)
    if "LOCAL_RANK" in os.environ:  # a worker of torchrun
        from drawloom.components.distributed.parent import watch_parent

        watch_parent(parent)
    try:
        from drawloom.components.distributed.torchrun import rank_console
        from drawloom.graph.cli.main import main as command_line

        return command_line(console=rank_console())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:  # what is left is Python's own way out, where it gives up our handlers
        _handle(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to those that end a moment after another
        _handle(signal.SIGINT, _end)


def _handle(number: signal.Signals, handler: Any) -> None:
    """Take a signal from now on, unless this process shall ignore it, as `nohup` asks."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    """Without a traceback, and without the time that closing takes; a run that is open takes the signal itself."""
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Let commands close what they have opened; an import may print a traceback, or swallow the exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
