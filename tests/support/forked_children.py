"""Commands whose child processes fork: an interpreter that starts would import torch for two seconds."""

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from support.mutations import put


class ForkedPopen(subprocess.Popen[Any]):
    """
    A child process; `python -m MODULE` of drawloom runs in a fork of this process.

    It has its own process id, session, standard streams, environment and signal handlers, as after an exec. /proc shows
    the command line and the environment of this process.
    """

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        if words := find_module_and_arguments(args):
            options["preexec_fn"] = partial(_run_module_and_exit, words, options.pop("env", None))
        super().__init__(args, **options)


def fork_children() -> None:
    """Let this process fork its children. For a process of `run_ranks`: nothing undoes it."""
    put(subprocess, "Popen", ForkedPopen)
    put(subprocess_handler, "Popen", ForkedPopen)  # of torchrun's agent


def find_module_and_arguments(args: Sequence[str]) -> list[str]:
    """Return the module that `python -m` runs and its arguments, or an empty list for another command."""
    if not isinstance(args, list | tuple):
        return []
    executable, *words = args
    words = words[1:] if words[:1] == ["-u"] else words
    is_module = executable == sys.executable and words[:1] == ["-m"]
    return words[1:] if is_module and words[1].partition(".")[0] in ("drawloom", "torch") else []


def _run_module_and_exit(words: Sequence[str], environment: Mapping[str, str] | None) -> NoReturn:
    """Run a module in a child process, which `subprocess` has forked and would now replace by another program."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the parent process waits for the end of a pipe among them
    code = 1
    try:
        _restore_signal_handlers()
        if environment is not None:
            os.environ.clear()
            os.environ |= environment
        sys.argv = [*words]
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, os.fdopen(number, "w" if number else "r", 1, closefd=False))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _restore_signal_handlers() -> None:
    """Install the handlers of a new interpreter; ignored signals stay ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # `subprocess` has restored the default
        signal.signal(number, signal.SIG_IGN)
