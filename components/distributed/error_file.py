"""
A worker's error file for torchrun.

A worker can neither keep torchrun from printing its failure table nor choose torchrun's exit code, which is 1. But its
error file (torch.distributed.elastic.multiprocessing.errors) determines the table's text and the first failed rank.
"""

import json
import math
import time
from contextlib import suppress


def write_torchrun_error_file(path: str, text: str, is_cause: bool) -> None:
    """
    Write this worker's error file, which torchrun reads, to `path`; "" writes none.

    The file's time is later on ranks other than the cause, because torchrun reports the earliest failure.
    """
    seconds = time.time()
    # torchrun treats the earliest failure as the cause; its timestamps are whole seconds
    timestamp = math.floor(seconds) if is_cause else math.ceil(seconds) + 1
    extra = {"py_callstack": text.strip().partition("\n")[0], "timestamp": str(timestamp)}
    with suppress(OSError):  # the message is also on the terminal and in the log
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)
