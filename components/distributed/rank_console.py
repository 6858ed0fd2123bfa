"""Console rules by rank: one rank prints a failure."""

import time
import warnings
from functools import partial
from typing import Any

from drawloom import UserError
from drawloom.components.distributed.error_file import write_torchrun_error_file
from drawloom.components.distributed.launch_store import (
    Failure,
    call_store_with_timeout,
    claim_first_failure,
    connect_to_launch_store,
)
from drawloom.components.distributed.torchrun import Launch, read_launch
from drawloom.graph.cli.command import Console

STORE_TIMEOUT = 3.0  # seconds for the store of torchrun to answer
HEAD_START = 2.0  # seconds; if all ranks find the same problem, rank 0 prints it, whose log people read first


def create_rank_console() -> Console:
    """
    Return this rank's printing rules: only rank 0 prints warnings, and only the first rank to fail prints the failure.
    """
    try:
        launch = read_launch()
    except UserError:  # raised again, and printed, when the run opens its processes
        return Console()
    if launch.rank > 0:
        warnings.showwarning = _print_nothing  # a run replaces it, once open, by one that logs
    return Console(launch.rank == 0, partial(_agree_on_first_failure_and_write_error_file, launch))


def _agree_on_first_failure_and_write_error_file(launch: Launch, text: str) -> bool:
    """
    Write the error file, with the text of the launch's first failure, which may be another rank's.

    Return whether this rank's failure is the first; True, without a file, if there is no store.
    """
    if launch.is_single_process or not launch.agent_store:
        return True

    def wait_and_claim_failure() -> Failure:
        store = connect_to_launch_store(launch.address, launch.port, launch.attempt, STORE_TIMEOUT)
        end = time.monotonic() + (HEAD_START if launch.rank else 0.0)
        while time.monotonic() < end and not store.check(["failure"]):
            time.sleep(0.05)
        return claim_first_failure(store, Failure(launch.rank, text))

    first = call_store_with_timeout(STORE_TIMEOUT + HEAD_START, wait_and_claim_failure) or Failure(launch.rank, text)
    write_torchrun_error_file(launch.error_file, first.text, is_cause=first.reporter == launch.rank)
    return first.reporter == launch.rank


def _print_nothing(*_arguments: Any, **_named: Any) -> None:
    """Print nothing; for `warnings.showwarning`."""
