"""The entry point `python -m drawloom`: signal handlers, and then the command line."""

import io
import os
import signal
import sys

TYPE_CHECKING = False  # as of `typing`, whose import takes as long as all others, in which Ctrl-C has a traceback
if TYPE_CHECKING:
    from types import FrameType


THREAD_SECONDS = 5.0  # for threads to end after the command


def main() -> int:
    """Install signal handlers, and run the command line. Returns its exit code."""
    _open_streams()
    # Before the imports below, which take seconds in which a signal or a dead parent must already be noticed.
    parent = os.getppid()
    _handle(signal.SIGTERM, _end)
    _handle(signal.SIGINT, _interrupt)
    if sys.argv[1:2] == ["run"]:
        from drawloom.components.distributed.guard import guard

        guard.start()  # before there are threads
    if "LOCAL_RANK" in os.environ:  # a worker of torchrun
        from drawloom.components.distributed.parent import watch_parent

        watch_parent(parent)
    from drawloom.components.distributed.cpu_threads import sleep_on_busy_machine

    sleep_on_busy_machine(os.environ, os.getloadavg()[0])
    try:
        from drawloom.components.distributed.torchrun import rank_console
        from drawloom.graph.cli.main import main as command_line

        code = command_line(console=rank_console())
        _end_with_threads(code)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:  # Python restores the default handlers while it shuts down
        _handle(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to workers that end shortly after the first
        _handle(signal.SIGINT, _end)


def _end_with_threads(code: int) -> None:
    """End this process with a warning if a component has left a thread for which Python would wait for ever."""
    import threading
    import time

    end, main_thread = time.monotonic() + THREAD_SECONDS, threading.main_thread()
    while names := [each.name for each in threading.enumerate() if not each.daemon and each is not main_thread]:
        if time.monotonic() > end:
            text = f"a component has left threads that have not ended {THREAD_SECONDS:g} s after the command: "
            print(text + ", ".join(names), file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)
        time.sleep(0.05)


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters that the encoding of the others lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # a file that is opened later would get the descriptor, and what is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _handle(number: signal.Signals, handler: object) -> None:
    """Install a handler, unless the signal is ignored, as under `nohup`."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)  # type: ignore[arg-type]  # a function, or SIG_IGN


def _end(number: int, _frame: "FrameType | None") -> None:
    """End at once, without traceback or cleanup; an open run replaces this handler by its own."""
    os._exit(128 + number)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt, so that commands close what they opened; during an import, end at once, in one line."""
    # An import may swallow the exception, or print a traceback of its own.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.environ.get("RANK", "0") == "0":
                with open(2, "wb", closefd=False, buffering=0) as stderr:
                    stderr.write(b"interrupted\n")
            _end(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
