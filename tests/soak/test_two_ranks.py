"""Saves of two ranks, with one rank killed or failing at every I/O call in turn."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import LocalNode, StateNode, checkpointer
from support.disk import FailAt, kill_at, watch_calls
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


def _node(folder: Path, mesh: RankMesh, step: int) -> Any:
    states = {"shared": StateNode({"step": step}), "own": LocalNode({"step": step, "rank": mesh.world.rank})}
    return checkpointer(folder, states, mesh, every=1, keep=2, staging=Blocking())


def _save(folder: Path, *steps: int) -> None:
    with _mesh() as mesh:
        for step in steps:
            _node(folder, mesh, step).save(Step(step, 100))


def _save_and_kill(folder: Path, rank: int, number: int) -> None:
    with _mesh() as mesh:
        if mesh.world.rank == rank:
            with watch_calls(kill_at(number)):
                _node(folder, mesh, 3).save(Step(3, 100))
        else:
            _node(folder, mesh, 3).save(Step(3, 100))


def _restore(folder: Path) -> tuple[int, int]:
    with _mesh() as mesh:
        node = _node(folder, mesh, 0)
        return node.restore(), node.states["own"].state["step"]


def _fail_every_call(base: Path, rank: int, code: int) -> list[tuple[list[str], int, list[str]]]:
    """Let every call of one rank fail in turn; return the errors at steps 3 and 4, the restored step, and the files."""
    outcomes: list[tuple[list[str], int, list[str]]] = []
    with _mesh() as mesh:
        for number in range(1, 100):
            folder = base / f"run-{number}"
            if mesh.world.rank == 0:
                shutil.copytree(base / "good", folder)
            mesh.world.gather_json(None)
            fault = FailAt(number if mesh.world.rank == rank else -1, code)
            node = _node(folder, mesh, 3)
            errors = []
            with watch_calls(fault):
                for step in (3, 4):
                    try:
                        node.save(Step(step, 100))
                    except UserError as error:
                        errors.append(str(error))
            restored, left = _node(folder, mesh, 0).restore(), sorted(os.listdir(folder / "checkpoints"))
            if not any(mesh.world.gather_json(fault.hit is not None)):
                return outcomes
            all_errors: list[list[str]] = mesh.world.gather_json(errors)
            if all_errors[0] != all_errors[1]:
                raise ValueError(f"the ranks raised different errors: {all_errors}")
            outcomes.append((errors, restored, left))
    raise ValueError("there is no end to the calls")


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "code"), [(0, errno.ENOSPC), (1, errno.EIO)])
def test_io_error_of_one_rank_skips_the_save_on_both(tmp_path: Path, rank: int, code: int) -> None:
    """Both ranks raise the same error with rank, path and reason, and the next save is committed."""
    run_ranks(_save, 2, tmp_path / "good", 1, 2)
    for outcomes in run_ranks(_fail_every_call, 2, tmp_path, rank, code):
        assert len(outcomes) > (6 if rank else 14)
        for errors, restored, left in outcomes:
            assert restored == 4 or (restored == 3 and "after step 4 failed" in errors[0])
            assert not [name for name in left if name.startswith((".tmp", ".trash"))]
            for line in errors:
                assert f"rank {rank}: {tmp_path}" in line and os.strerror(code) in line
                assert ("disk full: needs " in line) == (code == errno.ENOSPC)
        assert sum(bool(errors) for errors, *_ in outcomes) >= (5 if rank else 12)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_at_any_call_loses_no_committed_step(tmp_path: Path, rank: int) -> None:
    """If one rank is killed, the other raises, and both restore the same step: the new one once it is committed."""
    run_ranks(_save, 2, tmp_path / "good", 1, 2)
    steps: list[int] = []
    for number in range(1, 100):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "good", folder)
        try:
            run_ranks(_save_and_kill, 2, folder, rank, number)
            break
        except RanksFailedError as failed:
            assert "exit code -9" in failed.failures[rank]
        both = run_ranks(_restore, 2, folder)
        assert both[0] == both[1] and both[0][0] == both[0][1]
        steps.append(both[0][0])
    assert len(steps) > (4 if rank else 14)
    assert steps == sorted(steps) and {*steps} <= {2, 3}
