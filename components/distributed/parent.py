"""
Watch on the parent process: workers end themselves when torchrun is killed.

The module imports almost nothing, so it can watch before torch's import, which takes seconds. The kernel's
PR_SET_PDEATHSIG can't be used: it fires when the starting thread ends, not when its process ends.
"""

import os
import threading
import time

NAME = "parent"
TICK = 0.25  # seconds between two polls
REPORTER = "0"  # the LOCAL_RANK of the worker that prints the message, one for each machine


def start_exit_with_parent_thread(parent_pid: int) -> None:
    """End this process, with exit code 1, soon after its parent process is gone. A second call does nothing."""
    if not any(thread.name == NAME for thread in threading.enumerate()):
        threading.Thread(target=_poll_and_exit_after_parent, args=(parent_pid,), name=NAME, daemon=True).start()


def _poll_and_exit_after_parent(parent_pid: int) -> None:
    """Poll the parent's process id, and end this process when the parent is gone."""
    while os.getppid() == parent_pid:
        time.sleep(TICK)
    _log_parent_exit(parent_pid)
    os._exit(1)


def _log_parent_exit(parent_pid: int) -> None:
    """Log why this process ends: as an error on one rank per machine, as information on the others."""

    import logging  # here, to keep the import of this module fast

    level = logging.ERROR if os.environ.get("LOCAL_RANK", REPORTER) == REPORTER else logging.INFO
    message = "process %d, which started this process, is gone, so this process ends"
    logging.getLogger("drawloom.distributed").log(level, message, parent_pid)
