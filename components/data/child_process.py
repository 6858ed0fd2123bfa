"""Child processes with a pipe to the parent. The pipe closes when either process ends."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from signal import Signals
from typing import Any

import attrs


@attrs.frozen
class ChildProcess:
    """A running child process, with the parent's end of its pipe."""

    process: BaseProcess
    pipe: Connection

    def wait_and_describe_exit(self) -> str:
        """Wait up to 1 s for a process whose pipe has closed, and describe how it ended."""
        self.process.join(1)
        code = self.process.exitcode or 0
        return f"was killed by {Signals(-code).name}" if code < 0 else f"exited (exit code {code})"

    def kill_and_close(self) -> None:
        """Kill the process, which has no state to lose, and close the pipe."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def start_process_with_pipe(
    context: ForkServerContext | SpawnContext, main: Callable[..., None], *arguments: Any
) -> ChildProcess:
    """Start a process that calls `main` with the arguments, followed by its end of the pipe."""
    parent_end, child_end = context.Pipe()
    process = context.Process(target=main, args=(*arguments, child_end), daemon=True)
    try:
        process.start()
    finally:
        child_end.close()
    return ChildProcess(process, parent_end)
