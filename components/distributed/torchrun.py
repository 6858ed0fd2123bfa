"""
What torchrun tells its workers, and what a worker tells torchrun and the terminal when it fails.

A worker can't keep torchrun from printing its table of failures, nor choose torchrun's exit code, which is 1. But it
can say what stands in that table (torch.distributed.elastic.multiprocessing.errors), and which rank failed first.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import attrs

from drawloom.graph import UserError
from drawloom.graph.cli.exit_codes import Console

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@attrs.frozen
class Launch:
    """
    This process's number and how many there are, over all machines and on this one; and where the processes find one
    another, if torchrun started this one.

    `store_is_there` says that torchrun keeps the addresses of all, and not rank 0; `attempt` tells its starts apart,
    and into `error_file` a worker writes why it failed.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""
    port: int = 0
    store_is_there: bool = False
    attempt: str = ""
    error_file: str = ""

    @property
    def alone(self) -> bool:
        return self.world_size == 1


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """
    What torchrun said, or a single process if it said nothing.

    Raises UserError for variables that are set in part or make no sense.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in VARIABLES[:4]):
        return Launch()
    if missing := [name for name in VARIABLES if name not in environment]:
        there = [name for name in VARIABLES if name in environment]
        raise UserError(
            f"the environment sets {', '.join(there)} but not {', '.join(missing)}; start with torchrun, which sets "
            "all of them, or unset them all to run a single process",
            exit_code=2,
        )
    numbers = {name: _number(name, environment[name]) for name in VARIABLES[:4]}
    _check_below(numbers, "RANK", "WORLD_SIZE")
    _check_below(numbers, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    port = _number("MASTER_PORT", environment["MASTER_PORT"])
    rank, world_size, local_rank, local_world_size = numbers.values()
    return Launch(
        *(rank, world_size, local_rank, local_world_size),
        address=environment["MASTER_ADDR"],
        port=port,
        store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RUN_ID", "") + environment.get("TORCHELASTIC_RESTART_COUNT", ""),
        error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"the environment sets {name}={text!r}, which is no number; torchrun sets it right", 2)
    return int(text)


def _check_below(numbers: dict[str, int], number: str, bound: str) -> None:
    if numbers[number] >= numbers[bound]:
        raise UserError(
            f"the environment sets {number}={numbers[number]}, which is not below {bound}={numbers[bound]}; "
            "torchrun sets them right",
            exit_code=2,
        )


def write_error_file(path: str, text: str, is_cause: bool) -> None:
    """Say why this worker ends, and that it ends after the one that is the cause; nothing without a path."""
    seconds = time.time()
    when = math.floor(seconds) if is_cause else math.ceil(seconds) + 1  # torchrun takes the earliest for the cause
    extra = {"py_callstack": text.strip().partition("\n")[0], "timestamp": str(when)}
    with suppress(OSError):  # it is a courtesy
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)


PATIENCE = 3.0  # seconds for the store of torchrun to answer
HEAD_START = 2.0  # seconds in which rank 0, where people look, may be the first to tell what all ranks find


def rank_console() -> Console:
    """Rank 0 warns, Python's warnings included; of a failure tells rank 0, or else the first rank that has one."""
    try:
        launch = read_launch()
    except UserError:  # which a run tells when it opens
        return Console()
    if launch.rank > 0:
        warnings.showwarning = _nothing  # a run that is open puts one in its place that logs
    return Console(launch.rank == 0, partial(_is_first, launch))


def _is_first(launch: Launch, text: str) -> bool:
    """Whether no other rank has told a failure; yes, if there is nobody to ask."""
    if launch.alone or not launch.store_is_there:
        return True
    from drawloom.components.distributed.failure_monitor import Failure, claim, connect, within
    from drawloom.components.distributed.torchrun import write_error_file

    def ask() -> Failure:
        store = connect(launch.address, launch.port, launch.attempt, PATIENCE)
        end = time.monotonic() + (HEAD_START if launch.rank else 0.0)
        while time.monotonic() < end and not store.check(["failure"]):
            time.sleep(0.05)
        return claim(store, Failure(launch.rank, text))

    first = within(PATIENCE + HEAD_START, ask) or Failure(launch.rank, text)
    write_error_file(launch.error_file, first.text, is_cause=first.teller == launch.rank)
    return first.teller == launch.rank


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """What other ranks do with a warning."""
