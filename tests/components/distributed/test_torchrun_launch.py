"""torchrun's variables."""

import pytest

from drawloom.components.distributed.torchrun import VARIABLES, Launch, read_launch
from drawloom.graph import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_says_which_process_this_is() -> None:
    """Each number comes from its own variable."""
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, "127.0.0.1", 29500)


def test_a_start_of_torchrun_is_told_from_the_one_before() -> None:
    """By the run and the number of restarts; torchrun also says where a worker tells its failure."""
    more = {"TORCHELASTIC_RUN_ID": "ab-", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": "/tmp/error"}
    launch = read_launch(TORCHRUN | more | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (launch.attempt, launch.error_file, launch.store_is_there) == ("ab-2", "/tmp/error", True)
    assert not read_launch(TORCHRUN | more | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).store_is_there


def test_without_variables_there_is_one_process() -> None:
    """An address alone, which clusters set for everybody, makes no group."""
    assert read_launch({"MASTER_ADDR": "host", "MASTER_PORT": "1", "HOME": "/"}) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_missing_variable_is_named(missing: str) -> None:
    """With any one of them left out, the message says which."""
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
        ("RANK", "-1", "RANK='-1', which is no number"),
        ("WORLD_SIZE", "", "WORLD_SIZE='', which is no number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name: str, value: str, words: str) -> None:
    """A rank lies below its world size, and both are numbers."""
    with pytest.raises(UserError) as caught:
        read_launch(TORCHRUN | {name: value})
    assert words in str(caught.value)
