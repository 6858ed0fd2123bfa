"""
torchrun's error file of a worker.

A worker can't keep torchrun from printing its table of failures, nor choose torchrun's exit code, which is 1. But its
error file (torch.distributed.elastic.multiprocessing.errors) holds the text of that table and which rank failed first.
"""

import json
import math
import time
from contextlib import suppress


def write_error_file(path: str, text: str, is_cause: bool) -> None:
    """Write torchrun's error file of this worker, dated after that of the rank that is the cause; no path: none."""
    seconds = time.time()
    # torchrun takes the earliest for the cause; its timestamps are whole seconds
    when = math.floor(seconds) if is_cause else math.ceil(seconds) + 1
    extra = {"py_callstack": text.strip().partition("\n")[0], "timestamp": str(when)}
    with suppress(OSError):  # the terminal and the log have the message too
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)
