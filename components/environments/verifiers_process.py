"""
Process that loads an environment of the package `verifiers`, and forks for each conversation.

The first request loads the environment. Then every new pipe belongs to a fork, which runs the environment's own
loop: the loop asks its client for the model's answers, and the client here reads them from the pipe. When the pipe
closes, the environment cleans up, and the fork ends. This file is run by its path; it imports the package when a
request has brought the path for imports.
"""

import asyncio
import faulthandler
import json
import logging
import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any


class ErrorRaiser(logging.Handler):
    """Handler to raise errors of reward functions: a rubric logs them and scores 0."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


class Policy:
    """Client whose answers are the policy's turns."""

    def __init__(self, pipe: Connection, prompt: Any, seconds: int) -> None:
        self.pipe, self.seconds = pipe, seconds
        self.contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]

    async def get_response(self, prompt: Any, **_: Any) -> Any:
        """Send the messages since the last turn, or none before the first one, and return the next turn."""
        from verifiers.types import Response

        contents, count = [message.content for message in prompt], len(self.contents)
        texts, roles = contents[count:], {message.role for message in prompt[count:]}
        if contents[:count] != self.contents or len(roles) > 1 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"it does something else than to add texts of one role after a turn: {prompt}")
        self.pipe.send({"message": "\n".join(texts), "role": "".join(roles)})
        faulthandler.cancel_dump_traceback_later()
        self.pipe.poll(None)  # the policy takes its time
        limit_time(self.seconds)
        turn = self.pipe.recv()
        self.contents = [*contents, turn["content"]]
        return Response.model_validate({"id": "", "created": 0, "model": "policy", "message": turn})


def limit_time(seconds: int) -> None:
    """End this process after so many seconds. A rubric can use the process's alarm, as math_verify does."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def load_environment(request: Any) -> Any:
    """Import and return an environment. Raises ValueError for one whose conversations drawloom can't hold."""
    sys.path[:] = [*request["path"], ""]
    import verifiers

    if not verifiers.__version__.startswith(("0.2.", "0.3.")):
        raise ValueError(f"verifiers {verifiers.__version__} is not 0.2 or 0.3; pip install 'drawloom[verifiers]'")
    environment = verifiers.load_environment(request["environment"], **request["arguments"])
    kind, base = type(environment), verifiers.MultiTurnEnv
    if not issubclass(kind, base) or kind.get_prompt_messages != base.get_prompt_messages:
        raise ValueError(f"{kind.__name__} chooses what the model reads; name a MultiTurnEnv that adds messages")
    if environment.requires_group_rollouts:
        raise ValueError("its rubric compares answers to a prompt; give it reward functions of one completion")
    verifiers.Client.register(Policy)
    logging.getLogger(verifiers.Rubric.__module__).addHandler(ErrorRaiser())
    return environment


def answer_request(environment: Any, pipe: Connection) -> Any:
    """Return the rows of a split, or hold a conversation and return its reward or error."""
    import numpy

    request = pipe.recv()
    if split := request.get("split"):
        return {"rows": [*(environment.get_dataset() if split == "train" else environment.get_eval_dataset())]}
    example, seconds = request["example"], request["seconds"]
    random.seed(repr(example))
    numpy.random.seed(random.getrandbits(32))
    limit_time(seconds)
    policy = Policy(pipe, example["prompt"], seconds)
    output = asyncio.run(environment.run_rollout(example, policy, "policy", {}))
    return {"error": f"{output['error']}"} if output["error"] else {"reward": output["reward"]}


def call_safely(function: Any, *arguments: Any) -> Any:
    """Return a function's result, or {"error": ...} with its exception, or with the cause of it."""
    try:
        return function(*arguments)
    except BaseException as error:  # an environment can raise anything, such as SystemExit
        error = error.__cause__ or error
        return {"error": f"{type(error).__name__}: {error}"}


def run_fork(environment: Any, pipe: Connection) -> None:
    """Answer a request in a process group of its own, and end all of the group's processes, and this process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (fork := os.fork()) == 0:
            os.setsid()
            pipe.send(call_safely(answer_request, environment, pipe))
        else:
            pipe.close()
            os.waitpid(fork, 0)
            os.killpg(fork, signal.SIGKILL)
    finally:
        os._exit(0)


def serve_forks(pipe: Connection) -> None:
    """Load the environment and answer with its tools; then fork for every pipe, until this one closes."""
    answer = environment = call_safely(load_environment, json.loads(pipe.recv_bytes()))
    if not isinstance(environment, dict):
        answer = {"tools": [tool.model_dump(exclude={"strict"}) for tool in environment.tool_defs or []]}
    pipe.send_bytes(json.dumps(answer).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    while True:
        fork_pipe = Connection(recv_handle(pipe))  # EOFError ends the process
        if os.fork() == 0:
            pipe.close()
            run_fork(environment, fork_pipe)
        fork_pipe.close()


if __name__ == "__main__":
    serve_forks(Connection(int(sys.argv[1])))
