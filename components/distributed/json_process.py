"""Child process that answers JSON requests through a pipe, each within a time limit."""

import json
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import attrs

from drawloom import internal


@attrs.define(eq=False)
class JsonProcess:
    """
    A Python file in its own process; the first argument is its pipe's descriptor.

    The process starts with the first request, in isolated mode: neither the environment nor the current directory can
    change its imports, and it prints nothing. It ends when its pipe closes, as when this process is killed.
    """

    file: str
    _process: Any = internal(None)
    _pipe: Any = internal(None)

    @property
    def is_running(self) -> bool:
        """Whether a request has started the process, and none has failed since."""
        return self._process is not None

    def ask(self, request: Any, seconds: float) -> Any:
        """
        Send a request, and return its answer.

        Raises EOFError if the process dies, and TimeoutError if it takes over `seconds`; it is killed.
        """
        if self._process is None:
            self._pipe, child_end = Pipe()
            command = [sys.executable, "-I", self.file, str(child_end.fileno())]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )
            child_end.close()
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            if self._pipe.poll(seconds):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise EOFError(f"the process of {self.file} has died") from error
        self.close()
        raise TimeoutError(f"the process of {self.file} takes more than {seconds:g} s")

    def open_pipe(self) -> Connection:
        """Return one end of a new pipe, and send the other to the running process. Raises EOFError if it has died."""
        ours, theirs = Pipe()
        with theirs:
            try:
                send_handle(self._pipe, theirs.fileno(), self._process.pid)
            except OSError as error:
                self.close()
                raise EOFError(f"the process of {self.file} has died") from error
        return ours

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None
