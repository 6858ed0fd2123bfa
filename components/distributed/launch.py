"""How this process was started: torchrun's variables, the only thing that is read from the environment."""

import os
from collections.abc import Mapping

import attrs

from drawloom.graph import UserError

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
