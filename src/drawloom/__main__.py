"""Entry point of `python -m drawloom`: install signal handlers, and then run the command line."""

import faulthandler
import io
import os
import signal
import sys

TYPE_CHECKING = False  # not from `typing`: its import takes long, and Ctrl-C during an import prints a traceback
if TYPE_CHECKING:
    from types import FrameType


THREAD_SECONDS = 5.0  # time for threads to end after the command


def main() -> int:
    """Install signal handlers, run the command line, and return its exit code."""
    _reopen_closed_streams()
    faulthandler.enable()  # a crash of C code prints the Python stacks
    # Before the imports below: they take seconds, and a signal or a dead parent must be noticed meanwhile.
    parent = os.getppid()
    _install_handler(signal.SIGTERM, _exit_on_signal)
    _install_handler(signal.SIGINT, _raise_keyboard_interrupt)
    if sys.argv[1:2] == ["run"]:
        from drawloom.components.distributed.guard import guard

        guard.fork_guard_process()  # before any thread exists
    if "LOCAL_RANK" in os.environ:  # a worker of torchrun
        from drawloom.components.distributed.parent import start_exit_with_parent_thread

        start_exit_with_parent_thread(parent)
        # torch's C++ code warns with 20 lines of stack frames if the launcher is killed, which hosts the store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from drawloom.components.distributed.cpu_threads import shorten_thread_spinning

    shorten_thread_spinning(os.environ, os.getloadavg()[0])
    try:
        from drawloom.components.distributed.rank_console import create_rank_console
        from drawloom.graph.cli.main import main as command_line

        code = command_line(console=create_rank_console())
        _exit_despite_threads(code)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:  # Python restores the default handlers while it shuts down
        _install_handler(
            signal.SIGTERM, signal.SIG_IGN
        )  # torchrun sends it to workers that end shortly after the first
        _install_handler(signal.SIGINT, _exit_on_signal)


def _exit_despite_threads(code: int) -> None:
    """End this process with a warning if Python would wait forever for a component's thread."""
    import threading
    import time

    end, main_thread = time.monotonic() + THREAD_SECONDS, threading.main_thread()
    while names := [t.name for t in threading.enumerate() if not t.daemon and t is not main_thread]:
        if time.monotonic() > end:
            text = f"a component left threads that still run {THREAD_SECONDS:g} s after the command: "
            print(text + ", ".join(names), file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)
        time.sleep(0.05)


def _reopen_closed_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters missing in a stream's encoding."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # otherwise a file opened later would get the descriptor, and receive printed text
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _install_handler(number: signal.Signals, handler: object) -> None:
    """Install a handler, unless the signal is ignored, as under `nohup`."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)  # type: ignore[arg-type]  # a function, or SIG_IGN


def _exit_on_signal(number: int, _frame: "FrameType | None") -> None:
    """End immediately, without traceback or cleanup. An open run replaces this handler by its own."""
    os._exit(128 + number)


def _raise_keyboard_interrupt(number: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt, so that commands close resources. During an import, end immediately with one line."""
    # An import may swallow the exception, or print a traceback of its own.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.environ.get("RANK", "0") == "0":
                with open(2, "wb", closefd=False, buffering=0) as stderr:
                    stderr.write(b"interrupted\n")
            _exit_on_signal(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
