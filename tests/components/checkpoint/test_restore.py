"""Saving and restoring with several processes."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.run.job import NamedRun
from drawloom.components.run.randomness import ProcessRandomness
from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import BLOCK
from drawloom.graph import UserError
from support.checkpoints import LocalNode, ShardedNode, StateNode, checkpointer
from support.processes import RanksFailedError, run_ranks


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
        shared, own = StateNode(), LocalNode()
        node = checkpointer(folder, {"shared": shared, "own": own}, mesh)
        for index in indices:
            shared.state, own.state = {"step": index}, {"step": index, "rank": mesh.world.rank}
            node.save(Step(index, 100))


def _restore(folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    with _mesh() as mesh:
        shared, own = StateNode({"fresh": True}), LocalNode({"fresh": mesh.world.rank})
        step = checkpointer(folder, {"shared": shared, "own": own}, mesh).restore()
        return step, shared.state, own.state


def _fault(folder: Path, where: str, what: str, rank: int) -> tuple[str, int, Any]:
    """Save step 2 with a fault on one rank; return the ranks' errors, and the step restored by all afterwards."""
    with _mesh() as mesh:
        shared, own = StateNode({"step": 2}), LocalNode({"step": 2, "rank": mesh.world.rank})
        node = checkpointer(folder, {"shared": shared, "own": own}, mesh)
        if mesh.world.rank == rank:
            setattr(durable_files, where, _faulty(getattr(durable_files, where), what))
        return _error(node), node.restore(), own.state


def _faulty(call: Callable[..., Any], what: str) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(durable_files, call.__name__, call)
        raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))

    return fail


def _error(node: Checkpointer) -> str:
    try:
        node.save(Step(2, 100))
    except UserError as error:
        return str(error)
    return "saved"


def _draw_on(folder: Path) -> tuple[float, float]:
    """Save all ranks' generators, draw, restore, and draw again."""
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


def test_each_rank_restores_its_local_state(tmp_path: Path) -> None:
    """Replicated state is rank 0's on both, local state each rank's own, and both load the same step."""
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
    """Each rank repeats its own draws, and they differ between ranks."""
    results = run_ranks(_draw_on, 2, tmp_path)
    assert all(before == after for before, after in results)
    assert results[0] != results[1]


def test_a_checkpoint_loads_on_more_or_fewer_ranks(tmp_path: Path) -> None:
    """Replicated state loads on any number of ranks; a rank without saved local state keeps its initial one."""
    run_ranks(_save, 2, tmp_path, 1)
    three = run_ranks(_restore, 3, tmp_path)
    assert [shared for _, shared, _ in three] == [{"step": 1}] * 3
    assert [own for *_, own in three] == [{"step": 1, "rank": 0}, {"step": 1, "rank": 1}, {"fresh": 2}]
    assert run_ranks(_restore, 1, tmp_path) == [(1, {"step": 1}, {"step": 1, "rank": 0})]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_both(tmp_path: Path, rank: int) -> None:
    """Both raise the same message, with rank and file; both restore the previous step, and nothing is left over."""
    run_ranks(_save, 2, tmp_path, 1)
    main, other = run_ranks(_fault, 2, tmp_path, "create_file_with_content", "full", rank)
    temp = tmp_path / "checkpoints" / ".tmp-step-2"
    words = f"the checkpoint after step 2 failed: disk full: needs 0 bytes, * free in {temp.parent} "
    words += f"(rank {rank}: {temp}/rank-{rank}.json: No space left on device); repair the disk or free space, *"
    error, *rest = main
    assert fnmatch(error, words)
    assert rest == [1, {"step": 1, "rank": 0}]
    assert other == (error, 1, {"step": 1, "rank": 1})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def test_a_failing_commit_fails_on_both_ranks(tmp_path: Path) -> None:
    """The last rename is rank 0's; the other rank raises too."""
    run_ranks(_save, 2, tmp_path, 1)
    for error, step, _ in run_ranks(_fault, 2, tmp_path, "rename_durably", "full", 0):
        assert "after step 2 failed: disk full" in error and "(rank 0: " in error
        assert step == 1


@pytest.mark.parametrize(
    ("where", "rank"),
    [("create_file_with_content", 0), ("create_file_with_content", 1), ("rename_durably", 0), ("flush_to_disk", 0)],
)
def test_a_rank_killed_while_saving_leaves_the_previous_step(tmp_path: Path, where: str, rank: int) -> None:
    """The survivor's error names the group, and the next start restores the committed step."""
    run_ranks(_save, 2, tmp_path, 1)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_fault, 2, tmp_path, where, "killed", rank)
    assert "exit code -9" in caught.value.failures[rank]
    assert "group world (ranks 0, 1)" in caught.value.failures[1 - rank]
    assert run_ranks(_restore, 2, tmp_path)[rank] == (1, {"step": 1}, {"step": 1, "rank": rank})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def _save_sharded(folder: Path, holders: dict[str, list[int]]) -> None:
    """Save with the entries on the ranks in `holders`; an entry's state is its name's character code, and the rank."""
    with _mesh() as mesh:
        mine = [name for name, ranks in holders.items() if mesh.world.rank in ranks]
        state = {name: {"number": torch.full((3,), float(ord(name))), "by": mesh.world.rank} for name in mine}
        checkpointer(folder, {"spread": ShardedNode(state), "empty": ShardedNode({}, mine)}, mesh).save(Step(1, 9))


def _restore_sharded(folder: Path, holders: dict[str, list[int]]) -> dict[str, tuple[float, int]]:
    """Restore the entries now on this rank."""
    with _mesh() as mesh:
        mine = [name for name, ranks in holders.items() if mesh.world.rank in ranks]
        node, empty = ShardedNode({}, mine), ShardedNode({"fresh": 1}, mine)
        checkpointer(folder, {"spread": node, "empty": empty}, mesh).restore()
        if empty.state:
            raise ValueError("what was empty is not")
        return {name: (part["number"][2].item(), part["by"]) for name, part in node.state.items()}


def _error_of_sharded(folder: Path, holders: dict[str, list[int]]) -> str:
    try:
        _restore_sharded(folder, holders)
    except UserError as error:
        return str(error)
    return "restored"


TWO = {"a": [0], "b": [0, 1], "c": [1], "d": [1]}


def test_sharded_entries_load_on_the_ranks_that_hold_them(tmp_path: Path) -> None:
    """Saved by two ranks, they load on one, two others and three, each rank its own; the lowest holder saves."""
    run_ranks(_save_sharded, 2, tmp_path, TWO)
    saved = {"a": (97.0, 0), "b": (98.0, 0), "c": (99.0, 1), "d": (100.0, 1)}
    for holders, world in (
        ({name: [0] for name in "abcd"}, 1),
        ({"a": [1], "b": [0], "c": [0], "d": [0, 1]}, 2),
        ({"a": [2], "b": [1], "c": [2], "d": [2]}, 3),
    ):
        for rank, got in enumerate(run_ranks(_restore_sharded, world, tmp_path, holders)):
            assert got == {name: saved[name] for name, ranks in holders.items() if rank in ranks}
    state = load_node_state(tmp_path / "checkpoints/step-1", "spread")
    assert {name: part["by"] for name, part in state.items()} == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_entries_that_differ_are_all_listed(tmp_path: Path) -> None:
    """Every rank raises the same message, with missing and unexpected entries."""
    run_ranks(_save_sharded, 2, tmp_path, TWO)
    errors = run_ranks(_error_of_sharded, 2, tmp_path, {"a": [0], "c": [1], "x": [0], "y": [1]})
    assert errors[0] == errors[1]
    assert "state of [spread] does not fit the node: missing x, y; unexpected b, d" in errors[0]


def test_a_corrupt_file_of_one_rank_invalidates_the_step(tmp_path: Path) -> None:
    """With rank 1's file corrupt, both ranks fall back to the previous step."""
    run_ranks(_save, 2, tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-2" / "rank-1.json").write_text("{}")
    assert [step for step, *_ in run_ranks(_restore, 2, tmp_path)] == [1, 1]


def test_swapped_files_of_two_ranks_are_corrupt(tmp_path: Path) -> None:
    """Each file is valid, but not the one committed under its name."""
    run_ranks(_save, 2, tmp_path, 1, 2)
    folder = tmp_path / "checkpoints" / "step-2"
    (folder / "rank-0.json").rename(folder / "x")
    (folder / "rank-1.json").rename(folder / "rank-0.json")
    (folder / "x").rename(folder / "rank-1.json")
    assert [step for step, *_ in run_ranks(_restore, 2, tmp_path)] == [1, 1]


WIDTH = 2**18  # bytes of a row of the large tensor below
ROWS = 96


@attrs.define
class SlicedNode(StateNode):
    """A node with some rows of one large tensor."""

    first: int = 0
    rows: int = ROWS

    def state_slices(self) -> dict[str, TensorSlice]:
        """Return this rank's rows."""
        return {"w": TensorSlice((ROWS, WIDTH), (self.first, 0), (self.rows, WIDTH))}


def _node(rank: int, size: int) -> SlicedNode:
    return SlicedNode(first=ROWS * rank // size, rows=ROWS // size)


def _save_slices(folder: Path) -> None:
    with _mesh() as mesh:
        node = _node(mesh.world.rank, mesh.world.size)
        rows = torch.arange(node.first, node.first + node.rows)
        node.state = {"w": {"moment": rows.to(torch.uint8)[:, None].expand(-1, WIDTH).contiguous()}}
        checkpointer(folder, {"node": node}, mesh).save(Step(1, 9))


def _restore_slices(folder: Path) -> tuple[bool, int]:
    """Return whether a rank has its rows, and how many bytes it read from tensor files."""
    count, preadv = 0, os.preadv

    def read_and_count(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal count
        byte_count = preadv(descriptor, buffers, offset)
        count += byte_count if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors") else 0
        return byte_count

    with _mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read_and_count)
        node = _node(mesh.world.rank, mesh.world.size)
        step = checkpointer(folder, {"node": node}, mesh).restore()
        good = torch.equal(node.state["w"]["moment"][:, 0], torch.arange(node.first, node.first + node.rows).byte())
        return step == 1 and good, count


@pytest.mark.parametrize(("saved", "loaded"), [(3, 2), (1, 3), (2, 1)])
def test_all_ranks_together_read_a_checkpoint_once(tmp_path: Path, saved: int, loaded: int) -> None:
    """A rank reads its rows and at most a block around every piece; nothing is read for its digest alone."""
    run_ranks(_save_slices, saved, tmp_path)
    bytes_of_all = ROWS * WIDTH
    for good, count in run_ranks(_restore_slices, loaded, tmp_path):
        pieces = max(1, -(-saved // loaded)) + 1
        assert good and count <= bytes_of_all / loaded + pieces * BLOCK, (count, pieces)


def test_a_corrupt_block_that_no_rank_needs_invalidates_the_step(tmp_path: Path) -> None:
    """Blocks in no rank's state, here a removed rank's blocks, are divided among the ranks and verified."""
    run_ranks(_save, 3, tmp_path, 1, 2)
    path = tmp_path / "checkpoints" / "step-2" / "rank-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [step for step, *_ in run_ranks(_restore, 2, tmp_path)] == [1, 1]
