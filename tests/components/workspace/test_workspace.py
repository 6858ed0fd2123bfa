"""Ranks writing configurations and tensors, and one reading them, as real processes, and their leftovers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.workspace import workspace
from drawloom.components.workspace.workspace import NFSWorkspace, get_configs_parallel, get_tensors_parallel
from drawloom.graph import UserError
from support.processes import RanksFailedError, run_ranks

CPU = torch.device("cpu")
OF_OTHERS = ("sem.", "power-")
"""What tests that run at the same time have in shared memory for a moment."""


def _world() -> TorchGroup:
    dist.init_process_group("gloo")
    return TorchGroup("world", range(dist.get_world_size()), dist.group.WORLD, CPU)


def _list_segments() -> list[str]:
    """Return the segments this process has open, and all named shared memory."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    lines = [*links, *Path("/proc/self/maps").read_text().splitlines()]
    named = sorted(name for name in os.listdir("/dev/shm") if not name.startswith(OF_OTHERS))
    return named + [line for line in lines if "memfd:drawloom" in line]


def _config(rank: int, tensors: int) -> dict[str, Any]:
    made = {f"t{n}": torch.full((n % 3, 2), float(rank), dtype=torch.bfloat16) for n in range(tensors)}
    return {"rank": rank, "layers": [{"sizes": (rank, 1.5)}], "weights": made}


def _comparable(config: Any) -> Any:
    """Return a configuration with its tensors as lists."""
    if isinstance(config, torch.Tensor):
        return [str(config.dtype), config.tolist()]
    if isinstance(config, dict):
        return {key: _comparable(part) for key, part in config.items()}
    return [_comparable(part) for part in config] if isinstance(config, list | tuple) else config


class _Trouble(Exception):
    pass


def _failing(group: TorchGroup, where: str, path: str | None) -> str:
    """Fail on rank 1, while writing or while consuming, or on the reader; return this rank's error."""
    config: Any = {"bad": object()} if (where, group.rank) == ("writer", 1) else {"rank": group.rank}
    try:
        with get_configs_parallel(config, [0, 1, 2], group, path):
            if (where, group.rank) in (("consumer", 0), ("bystander", 1)):
                raise _Trouble("all is lost")
            if where == "agreed":
                run_on_rank0(group, lambda: (_ for _ in ()).throw(UserError("main says no")))
    except (UserError, _Trouble, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def _scenarios(folder: str | None) -> dict[str, Any]:
    """
    Do everything with a workspace on four ranks, one scenario after another: a rank out of step would spoil the next.
    """
    world = _world()
    before, results = _list_segments(), {}
    for count in (0, 1, 40, 1000):
        with get_configs_parallel(_config(world.rank, count), [0, 1, 2, 3], world, folder) as configs:
            kept = configs
            expected = [_comparable(_config(rank, count)) for rank in range(4)] if world.rank == 0 else []
            results[f"{count} tensors"] = _comparable(configs) == expected
        results[f"{count} emptied"] = kept == []
    with get_configs_parallel({"rank": world.rank}, [3, 1], world, folder) as configs:
        results["order"] = [*configs]
    with get_configs_parallel(None if world.rank % 2 else {}, [0, 1, 2, 3], world, folder) as configs:
        results["none"] = [*configs]
    for where in ("writer", "consumer", "bystander", "agreed"):
        results[f"failing {where}"] = _failing(world, where, folder)
    try:
        with get_configs_parallel({}, [0, 1] if world.rank < 2 else [0, 2], world, folder):
            pass
    except UserError as error:
        results["ranks differ"] = str(error)
    with get_configs_parallel({"rank": world.rank}, [1, 2], world, folder) as configs:
        results["still in step"] = [*configs]
    results["pairs"] = _pairs(world.rank, folder)
    del configs, kept
    world.gather_json(None)  # all are done
    results["left"] = [name for name in _list_segments() if name not in before]
    results["files"] = [] if folder is None else os.listdir(folder)
    return results


def _pairs(rank: int, folder: str | None) -> list[Any]:
    """Return two groups at once, and in one of them a gathering inside of a gathering."""
    handles = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = TorchGroup("pair", [0, 1] if rank < 2 else [2, 3], handles[rank // 2], CPU)
    with (
        get_configs_parallel({"outer": rank}, [0, 1], group, folder) as outer,
        get_configs_parallel({"inner": rank}, [1, 0], group, folder) as inner,
    ):
        return [*outer, *inner]


@pytest.fixture(scope="module", params=["memory", "folder"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return four ranks' results, through shared memory or through a new folder."""
    folder = str(tmp_path_factory.mktemp("shared") / "not" / "yet") if request.param == "folder" else None
    return run_ranks(_scenarios, 4, folder)


@pytest.mark.parametrize("count", [0, 1, 40, 1000])
def test_the_first_rank_gathers_everything(ranks: list[dict[str, Any]], count: int) -> None:
    """The first rank gets every configuration with its tensors, others none; the list is emptied afterwards."""
    assert all(rank[f"{count} tensors"] and rank[f"{count} emptied"] for rank in ranks)


def test_ranks_may_be_some_in_any_order(ranks: list[dict[str, Any]]) -> None:
    """The first named rank reads, in the named order; the others in the group have empty lists."""
    assert [rank["order"] for rank in ranks] == [[], [], [], [{"rank": 3}, {"rank": 1}]]


def test_a_rank_without_a_configuration_keeps_its_position(ranks: list[dict[str, Any]]) -> None:
    """A rank without a configuration is None at its position."""
    assert [rank["none"] for rank in ranks] == [[{}, None, {}, None], [], [], []]


def test_an_error_on_one_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    """A rank that fails while publishing or inside the block raises its own error, and all others a UserError."""
    bad = "config/bad is a object, which can't be saved"
    lost = "all is lost"
    assert [rank["failing writer"] for rank in ranks] == [
        f"TypeError: {bad}" if on_rank == 1 else f"RankError: rank 1: TypeError: {bad}" for on_rank in range(4)
    ]
    for where, failed in (("consumer", 0), ("bystander", 1)):
        assert [rank[f"failing {where}"] for rank in ranks] == [
            f"_Trouble: {lost}" if on_rank == failed else f"RankError: rank {failed}: _Trouble: {lost}"
            for on_rank in range(4)
        ]
    assert [rank["failing agreed"] for rank in ranks] == ["RankError: main says no"] * 4


def test_different_arguments_of_ranks_are_reported(ranks: list[dict[str, Any]]) -> None:
    """All ranks raise an error with a list of the ranks' arguments."""
    expected = "the ranks of a group passed ranks = [[0, 1], [0, 1], [0, 2], [0, 2]]; pass the same list on every rank"
    assert [rank["ranks differ"] for rank in ranks] == [expected] * 4


def test_ranks_stay_in_step(ranks: list[dict[str, Any]]) -> None:
    """After all these failures the next gathering is as good as the first."""
    assert [rank["still in step"] for rank in ranks] == [[], [{"rank": 1}, {"rank": 2}], [], []]


def test_groups_do_not_interfere(ranks: list[dict[str, Any]]) -> None:
    """Two groups at once, both with a nested gathering, get their own results."""
    assert [rank["pairs"] for rank in ranks] == [
        [{"outer": 0}, {"outer": 1}],
        [{"inner": 1}, {"inner": 0}],
        [{"outer": 2}, {"outer": 3}],
        [{"inner": 3}, {"inner": 2}],
    ]


def test_nothing_is_left_behind(ranks: list[dict[str, Any]]) -> None:
    """No shared memory is named, open or mapped afterwards if it was not before, and no file lies in the folder."""
    assert [(rank["left"], rank["files"]) for rank in ranks] == [([], [])] * 4


def _tensors() -> dict[str, Any]:
    world = _world()
    mine = torch.full((world.rank, 2), float(world.rank), dtype=[torch.bfloat16, torch.float8_e4m3fn][world.rank % 2])
    with get_tensors_parallel(mine, [1, 0], world) as tensors:
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        own = bool(tensors) and tensors[0] is mine
    with get_tensors_parallel(torch.tensor(world.rank), [0, 1]) as tensors:  # of all processes
        numbers = [int(tensor) for tensor in tensors]
    return {"shapes": shapes, "own": own, "numbers": numbers}


def test_tensors_arrive() -> None:
    """Tensors of any shape and dtype arrive, the reader's own is not copied, and no group is all processes."""
    results = run_ranks(_tensors, 2)
    assert results[0] == {"shapes": [], "own": False, "numbers": [0, 1]}
    expected = [((1, 2), "torch.float8_e4m3fn"), ((0, 2), "torch.bfloat16")]
    assert results[1] == {"shapes": expected, "own": True, "numbers": []}


def test_one_rank_gets_its_own_data() -> None:
    """A group of one has its own configuration, as the others' would arrive, and its own tensor."""
    with get_configs_parallel({"a": (1, 2)}, [0], SingleProcess()) as configs:
        assert configs == [{"a": (1, 2)}]
    tensor = torch.ones(2)
    with get_tensors_parallel(tensor, [0]) as tensors:
        assert tensors[0] is tensor
    with (
        pytest.raises(UserError, match=r"ranks = \[0, 1\] are not distinct ranks"),
        get_configs_parallel({}, [0, 1], SingleProcess()),
    ):
        pytest.fail("there is no second rank")


def _die_after_writing(folder: str) -> tuple[str, float]:
    world = _world()
    module: Any = workspace
    publish = module.publish_record

    def and_die(*arguments: Any) -> str:
        publish(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    module.publish_record = and_die
    began = time.monotonic()
    try:
        with get_configs_parallel({"rank": world.rank}, [0, 1], world, folder):
            return "fine", 0
    except UserError as error:
        return str(error), time.monotonic() - began


def test_a_killed_writer_is_noticed(tmp_path: Path) -> None:
    """The others learn of it soon; its leftovers are never read, and removed when its successor begins."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_die_after_writing, 2, str(tmp_path))
    assert "exit code -9" in caught.value.failures[1]
    text, seconds = caught.value.values[0]
    assert "another process stopped" in text
    assert seconds < 10
    assert len(os.listdir(tmp_path)) == 2
    with NFSWorkspace(tmp_path, rank=1) as successor:
        assert successor.read_configs_and_weights_from_rank(1) == (None, None)
    assert os.listdir(tmp_path) == []


def test_ranks_without_a_group_read_the_last_record(tmp_path: Path) -> None:
    """Without a group, a rank reads the last record of another; a rank without a record gives nothing."""
    first, second = NFSWorkspace(tmp_path / "new" / "folder", rank=0), NFSWorkspace(tmp_path / "new" / "folder", rank=1)
    assert second.read_configs_and_weights_from_rank(0) == (None, None)
    first.write_configs_and_weights({"step": 1}, {"a": torch.ones(2)})
    first.write_configs_and_weights({"step": 2}, {})
    assert second.read_configs_and_weights_from_rank(0) == ({"step": 2}, {})
    first.write_configs_and_weights(None, {"layer.0/w": torch.ones(2, requires_grad=True)})
    config, weights = second.read_configs_and_weights_from_rank(0)
    assert config is None and weights is not None
    assert torch.equal(weights["layer.0/w"], torch.ones(2))
    first.write_configs_and_weights({"a": torch.ones(1)}, {})
    assert second.read_configs_and_weights_from_rank(0) == ({"a": torch.ones(1)}, {})
    NFSWorkspace(tmp_path / "new" / "folder", rank=0)  # the next process of this rank begins
    assert second.read_configs_and_weights_from_rank(0) == (None, None)


def test_a_workspace_without_a_folder_is_not_initialized() -> None:
    """A workspace without a path is not initialized, and its methods raise ValueError."""
    none = NFSWorkspace()
    assert not none.is_initialized
    for work in (
        lambda: none.write_configs_and_weights({}, {}),
        lambda: none.read_configs_and_weights_from_rank(0),
        none.close,
    ):
        with pytest.raises(ValueError, match="give workspace_path"):
            work()


def test_the_rank_is_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, the rank is the process's own."""
    assert NFSWorkspace(tmp_path).rank == 0
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert NFSWorkspace(tmp_path).rank == 2
