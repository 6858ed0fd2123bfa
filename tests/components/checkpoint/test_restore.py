"""What several real processes save together, and what each of them gets back."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.reader import load_node
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.ports.run import Step
from drawloom.components.run.job import NamedRun
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.components.storage import atomic_write, durable_files
from drawloom.graph import UserError
from support.checkpoints import Memory, OwnMemory, SpreadMemory, checkpointer
from support.processes import RanksFailed, run_ranks


@contextmanager
def _mesh() -> Iterator[RankMesh]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20)
    mesh = RankMesh(processes=processes)
    processes.open()
    mesh.open()
    try:
        yield mesh
    finally:
        processes.close()


def _save(folder: Path, *indices: int) -> None:
    with _mesh() as mesh:
        shared, own = Memory(), OwnMemory()
        node = checkpointer(folder, {"shared": shared, "own": own}, mesh)
        for index in indices:
            shared.state, own.state = {"step": index}, {"step": index, "rank": mesh.world.rank}
            node.save(Step(index, 100))


def _restore(folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    with _mesh() as mesh:
        shared, own = Memory({"fresh": True}), OwnMemory({"fresh": mesh.world.rank})
        step = checkpointer(folder, {"shared": shared, "own": own}, mesh).restore()
        return step, shared.state, own.state


def _fault(folder: Path, where: str, what: str, rank: int) -> tuple[str, int, Any]:
    """Save step 2 with a fault on one rank: what each rank is told, and what they restore afterwards together."""
    with _mesh() as mesh:
        shared, own = Memory({"step": 2}), OwnMemory({"step": 2, "rank": mesh.world.rank})
        node = checkpointer(folder, {"shared": shared, "own": own}, mesh)
        if mesh.world.rank == rank:
            owner = atomic_write if where == "rename" else durable_files
            setattr(owner, where, _faulty(owner, getattr(owner, where), what))
        return _told(node), node.restore(), own.state


def _faulty(owner: Any, call: Callable[..., Any], what: str) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(owner, call.__name__, call)
        raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))

    return fail


def _told(node: Checkpointer) -> str:
    try:
        node.save(Step(2, 100))
    except UserError as error:
        return str(error)
    return "saved"


def _draw_on(folder: Path) -> tuple[float, float]:
    """Save the generators of each rank, draw, restore, and draw again."""
    with _mesh() as mesh:
        randomness = ProcessRandomness(job=NamedRun(name="x", seed=3), mesh=mesh)
        randomness.open()
        node = checkpointer(folder, {"randomness": randomness}, mesh)
        torch.rand(100)
        node.save(Step(1, 1))
        expected = torch.rand(()).item()
        torch.manual_seed(0)
        checkpointer(folder, {"randomness": randomness}, mesh).restore()
        return expected, torch.rand(()).item()


def test_each_rank_gets_back_its_own(tmp_path: Path) -> None:
    """Replicated state is the main rank's on both, local state each rank's own, and both load the same step."""
    run_ranks(_save, 2, tmp_path, 1, 2)
    expected = [(2, {"step": 2}, {"step": 2, "rank": rank}) for rank in range(2)]
    assert run_ranks(_restore, 2, tmp_path) == expected
    assert sorted(os.listdir(tmp_path / "checkpoints" / "step-2")) == [
        "manifest.json",
        "rank-0.json",
        "rank-0.safetensors",
        "rank-1.json",
        "rank-1.safetensors",
        "recipe.lock.toml",
    ]


def test_generators_are_restored_on_each_rank(tmp_path: Path) -> None:
    """Each rank goes on with its own draws, and they are not the same."""
    results = run_ranks(_draw_on, 2, tmp_path)
    assert all(before == after for before, after in results)
    assert results[0] != results[1]


def test_a_world_that_grew_or_shrank_loads(tmp_path: Path) -> None:
    """Shared state loads on any number of ranks; a rank that had no state of its own keeps what it has."""
    run_ranks(_save, 2, tmp_path, 1)
    three = run_ranks(_restore, 3, tmp_path)
    assert [shared for _, shared, _ in three] == [{"step": 1}] * 3
    assert [own for *_, own in three] == [{"step": 1, "rank": 0}, {"step": 1, "rank": 1}, {"fresh": 2}]
    assert run_ranks(_restore, 1, tmp_path) == [(1, {"step": 1}, {"step": 1, "rank": 0})]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_stops_the_save_on_both(tmp_path: Path, rank: int) -> None:
    """Both are told the same words, with rank and file; the step before is what both restore, and no rest is left."""
    run_ranks(_save, 2, tmp_path, 1)
    main, other = run_ranks(_fault, 2, tmp_path, "write_file", "full", rank)
    aside = tmp_path / "checkpoints" / ".tmp-step-2"
    words = f"the checkpoint after step 2 failed: disk full: needs 0 bytes, * free in {aside.parent} "
    words += f"(rank {rank}: {aside}/rank-{rank}.json: No space left on device)"
    told, *rest = main
    assert fnmatch(told, words)
    assert rest == [1, {"step": 1, "rank": 0}]
    assert other == (told, 1, {"step": 1, "rank": 1})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def test_a_failing_commit_stops_both(tmp_path: Path) -> None:
    """The last rename is the main rank's; the other one learns that it did not happen."""
    run_ranks(_save, 2, tmp_path, 1)
    for told, step, _ in run_ranks(_fault, 2, tmp_path, "rename", "full", 0):
        assert "after step 2 failed: disk full" in told and "(rank 0: " in told
        assert step == 1


@pytest.mark.parametrize(("where", "rank"), [("write_file", 0), ("write_file", 1), ("rename", 0), ("sync", 0)])
def test_a_rank_killed_while_saving_leaves_the_step_before(tmp_path: Path, where: str, rank: int) -> None:
    """The survivor ends with an error that names the group, and the next start restores what was committed."""
    run_ranks(_save, 2, tmp_path, 1)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fault, 2, tmp_path, where, "killed", rank)
    assert "exit code -9" in caught.value.failures[rank]
    assert "group world (ranks 0, 1)" in caught.value.failures[1 - rank]
    assert run_ranks(_restore, 2, tmp_path)[rank] == (1, {"step": 1}, {"step": 1, "rank": rank})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def _save_spread(folder: Path, holders: dict[str, list[int]]) -> None:
    """Each rank holds the entries that `holders` gives it; an entry's state says which it is."""
    with _mesh() as mesh:
        mine = [name for name, ranks in holders.items() if mesh.world.rank in ranks]
        state = {name: {"number": torch.full((3,), float(ord(name))), "by": mesh.world.rank} for name in mine}
        checkpointer(folder, {"spread": SpreadMemory(state), "empty": SpreadMemory({}, mine)}, mesh).save(Step(1, 9))


def _restore_spread(folder: Path, holders: dict[str, list[int]]) -> dict[str, tuple[float, int]]:
    """What each rank gets back of the entries that it holds now."""
    with _mesh() as mesh:
        mine = [name for name, ranks in holders.items() if mesh.world.rank in ranks]
        node, empty = SpreadMemory({}, mine), SpreadMemory({"fresh": 1}, mine)
        checkpointer(folder, {"spread": node, "empty": empty}, mesh).restore()
        if empty.state:
            raise ValueError("what was empty is not")
        return {name: (part["number"][2].item(), part["by"]) for name, part in node.state.items()}


def _told_of_spread(folder: Path, holders: dict[str, list[int]]) -> str:
    try:
        _restore_spread(folder, holders)
    except UserError as error:
        return str(error)
    return "restored"


TWO = {"a": [0], "b": [0, 1], "c": [1], "d": [1]}


def test_entries_move_with_whoever_holds_them(tmp_path: Path) -> None:
    """Saved by two ranks, they are given to one, to two others and to three, each rank its own; the lowest saves."""
    run_ranks(_save_spread, 2, tmp_path, TWO)
    saved = {"a": (97.0, 0), "b": (98.0, 0), "c": (99.0, 1), "d": (100.0, 1)}
    for holders, world in (
        ({name: [0] for name in "abcd"}, 1),
        ({"a": [1], "b": [0], "c": [0], "d": [0, 1]}, 2),
        ({"a": [2], "b": [1], "c": [2], "d": [2]}, 3),
    ):
        for rank, got in enumerate(run_ranks(_restore_spread, world, tmp_path, holders)):
            assert got == {name: saved[name] for name, ranks in holders.items() if rank in ranks}
    state = load_node(tmp_path / "checkpoints/step-1", "spread")
    assert {name: part["by"] for name, part in state.items()} == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_entries_that_differ_are_all_listed(tmp_path: Path) -> None:
    """On every rank the same words: what nobody saved, and what nobody holds."""
    run_ranks(_save_spread, 2, tmp_path, TWO)
    told = run_ranks(_told_of_spread, 2, tmp_path, {"a": [0], "c": [1], "x": [0], "y": [1]})
    assert told[0] == told[1]
    assert "state of [spread] does not fit the node: it lacks x, y; it has, and nothing here has, b, d" in told[0]


def test_damage_to_one_rank_s_file_is_damage_to_the_step(tmp_path: Path) -> None:
    """The main rank decides for all: the other one's file is broken, and both go back a step."""
    run_ranks(_save, 2, tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-2" / "rank-1.json").write_text("{}")
    assert [step for step, *_ in run_ranks(_restore, 2, tmp_path)] == [1, 1]


def test_swapped_files_of_two_ranks_are_noticed(tmp_path: Path) -> None:
    """Each is whole, and neither is where it was committed."""
    run_ranks(_save, 2, tmp_path, 1, 2)
    folder = tmp_path / "checkpoints" / "step-2"
    (folder / "rank-0.json").rename(folder / "x")
    (folder / "rank-1.json").rename(folder / "rank-0.json")
    (folder / "x").rename(folder / "rank-1.json")
    assert [step for step, *_ in run_ranks(_restore, 2, tmp_path)] == [1, 1]
