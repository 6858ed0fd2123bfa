"""Which of the processes that torchrun started tells what all of them have to say before they find one another."""

import time
import warnings
from functools import partial
from typing import Any

from drawloom.components.distributed.launch import Launch, read_launch
from drawloom.graph import UserError
from drawloom.graph.cli.exit_codes import Voice

PATIENCE = 3.0  # seconds for the store of torchrun to answer
HEAD_START = 2.0  # seconds in which rank 0, where people look, may be the first to tell what all ranks find


def voice_of_this_rank() -> Voice:
    """Rank 0 warns, Python's warnings included; of a failure tells rank 0, or else the first rank that has one."""
    try:
        launch = read_launch()
    except UserError:  # which a run tells when it opens
        return Voice()
    if launch.rank > 0:
        warnings.showwarning = _nothing  # a run that is open puts one in its place that logs
    return Voice(launch.rank == 0, partial(_is_first, launch))


def _is_first(launch: Launch, text: str) -> bool:
    """Whether no other rank has told a failure; yes, if there is nobody to ask."""
    if launch.alone or not launch.store_is_there:
        return True
    from drawloom.components.distributed.alarm import Failure, claim
    from drawloom.components.distributed.error_file import write_error_file
    from drawloom.components.distributed.stores import connect, within

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
