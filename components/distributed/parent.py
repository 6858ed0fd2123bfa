"""
The process that started this one: workers of a torchrun that is killed end themselves.

It imports next to nothing, so that it can watch before torch is imported, which takes seconds. The kernel's own way
(PR_SET_PDEATHSIG) looks at the thread that started the process, not at its process, and that may be one that ends.
"""

import os
import threading
import time

NAME = "parent"
TICK = 0.25  # seconds between two looks
SPOKESMAN = "0"  # the LOCAL_RANK of the worker that tells it on the terminal, for all of a machine


def watch_parent(parent: int) -> None:
    """End this process, with exit code 1, soon after the one that started it is gone. A second call does nothing."""
    if not any(thread.name == NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent,), name=NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK)
    _tell(parent)
    os._exit(1)


def _tell(parent: int) -> None:
    import logging  # not before it is needed

    level = logging.ERROR if os.environ.get("LOCAL_RANK", SPOKESMAN) == SPOKESMAN else logging.INFO
    told = "process %d, which started this one, is gone; so this one ends"
    logging.getLogger("drawloom.distributed").log(level, told, parent)
