"""
Child process of the reward `rewards.code`: runs a program and its tests under limits.

It imports only the standard library, and reads a JSON object from its standard input: `program`, `tests`, `seconds`,
`bytes` and `nonce`. It writes the nonce to the descriptor in its first argument after the last test.
"""

import json
import os
import resource
import sys


def run_program_and_tests() -> None:
    """Run the request. A program that fails or exits writes no nonce."""
    descriptor = int(sys.argv[1])
    request = json.load(sys.stdin)
    for limit, value in (
        (resource.RLIMIT_CPU, request["seconds"]),
        (resource.RLIMIT_AS, request["bytes"]),
        (resource.RLIMIT_FSIZE, 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    namespace = {"__name__": "__main__"}
    # Popped, so that the program finds the nonce in no variable of this frame's request.
    nonce = request.pop("nonce")
    exec(compile(request["program"], "<program>", "exec"), namespace)
    exec(compile(request["tests"], "<tests>", "exec"), namespace)
    os.write(descriptor, nonce.encode())


if __name__ == "__main__":
    run_program_and_tests()
