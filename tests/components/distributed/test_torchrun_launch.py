"""torchrun's environment variables."""

import pytest

from drawloom.components.distributed.torchrun import ROUND, SPARES, VARIABLES, Launch, read_launch
from drawloom.graph import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_ranks_are_read_from_the_variables() -> None:
    """Each number comes from its own variable."""
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, "127.0.0.1", 29500, node_rank=1, node_count=2)


def test_machines_are_counted() -> None:
    """Torchrun's variables number the machines; without them all machines have equally many workers."""
    launch = read_launch(TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"})
    assert (launch.node_rank, launch.node_count) == (2, 3)
    launch = read_launch(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "9"})
    assert (launch.node_rank, launch.node_count) == (0, 3)


def test_attempts_of_torchrun_are_distinguished() -> None:
    """
    The attempt is the run id and the restart count, or our launcher's number, which all machines share.

    The error file is torchrun's.
    """
    more = {"TORCHELASTIC_RUN_ID": "ab-", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": "/tmp/error"}
    launch = read_launch(TORCHRUN | more | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (launch.attempt, launch.error_file, launch.agent_store) == ("ab-2", "/tmp/error", True)
    assert not read_launch(TORCHRUN | more | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert not launch.has_own_keys
    ours = read_launch(TORCHRUN | more | {ROUND: "3"})
    assert (ours.attempt, ours.has_own_keys) == ("ab-3", True)
    assert read_launch(TORCHRUN | {SPARES: "2"}).spares == 2


def test_without_variables_there_is_one_process() -> None:
    """MASTER_ADDR and MASTER_PORT alone, which some clusters set for every job, make no group."""
    assert read_launch({"MASTER_ADDR": "host", "MASTER_PORT": "1", "HOME": "/"}) == Launch()


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_missing_variable_is_named(missing: str) -> None:
    """With any one of the variables missing, the message names it."""
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UserError, match=f"but not {missing};") as caught:
        read_launch(environment)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "8", "RANK=8, which is not below WORLD_SIZE=8"),
        ("LOCAL_RANK", "4", "LOCAL_RANK=4, which is not below LOCAL_WORLD_SIZE=4"),
        ("WORLD_SIZE", "0", "RANK=5, which is not below WORLD_SIZE=0"),
        ("RANK", "-1", "RANK='-1', not a number"),
        ("WORLD_SIZE", "", "WORLD_SIZE='', not a number"),
    ],
)
def test_invalid_ranks_are_refused(name: str, value: str, words: str) -> None:
    """Ranks are numbers below their world sizes."""
    with pytest.raises(UserError) as caught:
        read_launch(TORCHRUN | {name: value})
    assert words in str(caught.value)
