"""
What torchrun shows of a worker that failed, in the table that it prints whenever one does.

A worker can't keep torchrun from printing that table, nor choose torchrun's exit code, which is 1. But it can say what
stands there (torch.distributed.elastic.multiprocessing.errors), and which rank was the first.
"""

import json
import math
import time
from contextlib import suppress


def write_error_file(path: str, text: str, is_cause: bool) -> None:
    """Say why this worker ends, and that it ends after the one that is the cause; nothing without a path."""
    seconds = time.time()
    when = math.floor(seconds) if is_cause else math.ceil(seconds) + 1  # torchrun takes the earliest for the cause
    extra = {"py_callstack": text.strip().partition("\n")[0], "timestamp": str(when)}
    with suppress(OSError):  # it is a courtesy
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)
