"""
Process for tool calls, each in a fork with limited time, memory and output.

The first request imports the tools; a fork starts with them imported, and leaves nothing behind. When the pipe closes,
as when the run is killed, the process ends with its fork. This file is run by its path; only the tools' files import
more than the standard library.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

MAX_FILE = 2**20
"""Largest file written by a tool, in bytes."""

Functions = Mapping[str, Callable[..., object]]


def import_functions(request: Mapping[str, Any]) -> dict[str, Callable[..., object]]:
    """Import the functions in a request's `tools`, their files by name, with its `path`."""
    sys.path[:] = request["path"]
    functions: dict[str, Callable[..., object]] = {}
    for name, file in request["tools"].items():
        spec = importlib.util.spec_from_file_location(f"tool_{name}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions[name] = getattr(module, name).function
    return functions


def call_function(functions: Functions, request: Mapping[str, Any], pipe: Connection) -> None:
    """Call a function in this process, and send its text, or {"error": ...}."""
    count, used = request["characters"], int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_CPU, int(request["seconds"]) + 1),
        (resource.RLIMIT_AS, used + request["bytes"]),
        (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        text = str(functions[request["tool"]](**request["arguments"]))
        answer: dict[str, Any] = {"text": text[:count], "characters": len(text)}
    except BaseException as error:  # a tool can raise anything, such as SystemExit
        answer = {"error": f"{type(error).__name__}: {error}"[:count]}
    pipe.send_bytes(json.dumps(answer).encode())


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the given parent ends, or has ended."""
    with suppress(AttributeError):  # outside Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def call_in_fork(functions: Functions, request: Mapping[str, Any], parent: Connection) -> dict[str, Any]:
    """Return a call's answer; {"timeout": true} if it takes too long. Ends this process if the parent's has ended."""
    ours, theirs = Pipe(duplex=False)
    deadline = time.monotonic() + request["seconds"]
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setsid()
            parent.close()
            end_with_parent(os.getppid())
            call_function(functions, request, theirs)
        os._exit(0)
    theirs.close()
    try:
        ready = wait([ours, parent], max(0.0, deadline - time.monotonic()))
        if parent in ready:  # it sends nothing before the answer, so its pipe has closed
            raise SystemExit
        return json.loads(ours.recv_bytes()) if ready else {"timeout": True}
    except EOFError:
        return {"error": "the tool's process died, such as at the limit of its memory"}
    finally:
        for kill in (os.killpg, os.kill):  # before its setsid, the fork has no group
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()


def serve_calls(pipe: Connection) -> None:
    """Import the tools, and answer calls until the pipe closes."""
    with suppress(EOFError):
        try:
            functions, answer = import_functions(json.loads(pipe.recv_bytes())), {}
        except Exception as error:  # a file can raise anything
            functions, answer = {}, {"error": f"{type(error).__name__}: {error}"}
        while True:
            pipe.send_bytes(json.dumps(answer).encode())
            answer = call_in_fork(functions, json.loads(pipe.recv_bytes()), pipe)


if __name__ == "__main__":
    serve_calls(Connection(int(sys.argv[1])))
