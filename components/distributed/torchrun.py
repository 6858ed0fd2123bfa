"""Environment variables for torchrun's workers."""

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from drawloom import UserError

CONTINUES = "continues"
"""Key in the launcher's store: the workers go on if one of them is lost, so the launcher must not end them."""

SPARES = "DRAWLOOM_SPARES"
"""Variable with the number of hot spares on a machine, from `drawloom launch`."""

ROUND = "DRAWLOOM_ROUND"
"""
Variable with the number of times that the workers of a launch were started, equal on all machines, from `drawloom
launch`. torchrun's restarts count the failures on a machine, and its store keeps keys from before a restart.
"""

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@attrs.frozen
class Launch:
    """
    This process's rank and world size, globally and on this machine, and the rendezvous store's address.

    `node_rank` is this machine's index among the `node_count` machines (torchrun's nodes). `agent_store` is True if the
    store is in torchrun instead of rank 0; `attempt` is unique to every restart of the workers, and with `has_own_keys`
    it is the same on all machines, for keys in the store. A worker writes its failure to `error_file`. The launcher
    starts `spares` more processes on every machine once the run has begun.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""
    port: int = 0
    agent_store: bool = False
    attempt: str = ""
    has_own_keys: bool = False
    error_file: str = ""
    node_rank: int = 0
    node_count: int = 1
    spares: int = 0

    @property
    def is_single_process(self) -> bool:
        """Whether this is the launch's only process."""
        return self.world_size == 1


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """
    Return the launch described by torchrun's variables; a single process if none is set.

    Raises UserError if some variables are missing or invalid.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in VARIABLES[:4]):
        return Launch()
    if missing := [name for name in VARIABLES if name not in environment]:
        present = [name for name in VARIABLES if name in environment]
        raise UserError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}; start with torchrun, which sets "
            "all of them, or unset them all to run a single process",
            exit_code=2,
        )
    numbers = {name: _parse_number(name, environment[name]) for name in VARIABLES[:4]}
    _check_number_below_bound(numbers, "RANK", "WORLD_SIZE")
    _check_number_below_bound(numbers, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    port = _parse_number("MASTER_PORT", environment["MASTER_PORT"])
    rank, world_size, local_rank, local_world_size = numbers.values()
    # Launchers other than torchrun don't set these, and start equally many processes on each machine.
    nodes = {"GROUP_RANK": str(rank // local_world_size), "GROUP_WORLD_SIZE": str(-(-world_size // local_world_size))}
    node_rank, node_count = (_parse_number(name, environment.get(name, text)) for name, text in nodes.items())
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=environment["MASTER_ADDR"],
        port=port,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RUN_ID", "")
        + environment.get(ROUND, environment.get("TORCHELASTIC_RESTART_COUNT", "")),
        has_own_keys=ROUND in environment,
        error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
        node_rank=node_rank,
        node_count=node_count,
        spares=_parse_number(SPARES, environment.get(SPARES, "0")),
    )


def _parse_number(name: str, text: str) -> int:
    """Return a variable's number. Raises UserError for other text."""
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"the environment sets {name}={text!r}, not a number; start with torchrun, which sets it", 2)
    return int(text)


def _check_number_below_bound(numbers: dict[str, int], number: str, bound: str) -> None:
    """Raise UserError unless a variable's number is below another's."""
    if numbers[number] >= numbers[bound]:
        raise UserError(
            f"the environment sets {number}={numbers[number]}, which is not below {bound}={numbers[bound]}; "
            "start with torchrun, which sets them",
            exit_code=2,
        )


def get_boot_and_namespace_id() -> str:
    """Return the boot id and the pid namespace: equal for processes that can open one another's /proc/PID/fd."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
