"""Stagers in torch's `async_save` on several ranks, whose state is in DTensors."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.checkpoint.staging.none import NoStaging
from drawloom.components.checkpoint.staging.overlapped import Overlapped
from support.processes import run_ranks

WHOLE = torch.arange(5 * 40_000.0).view(5, 40_000)  # which two ranks share unevenly, in parts that threads copy
STAGERS: dict[str, Any] = {"blocking": Blocking, "overlapped": Overlapped, "none": NoStaging}


def _state(dim: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a state partitioned along a dimension, and this rank's part of its weight."""
    weight: DTensor = distribute_tensor(WHOLE, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])
    return {"weight": weight, "step": torch.zeros(())}, weight.to_local()


def _save_and_load(folder: Path) -> dict[str, tuple[torch.Tensor, float]]:
    """Save two steps with each stager while the state changes; return whole weights and step numbers."""
    dist.init_process_group("cpu:gloo")
    state, mine = _state(0)
    before = mine.clone()
    for name, kind in STAGERS.items():
        stager = kind()
        for step in (1, 2):
            state["step"].fill_(step)
            mine.copy_(before * step)
            saved: Any = async_save(state, checkpoint_id=folder / f"{name}-{step}", async_stager=stager)
            uploaded = saved if isinstance(saved, Future) else saved.upload_completion
            stager.synchronize_staging() if stager.makes_copies else uploaded.result()
            mine.zero_()
            uploaded.result()  # torch's threads of two saves would share a group
    loaded = {}
    for path in sorted(folder.iterdir()):
        state, _ = _state(1)
        load(state, checkpoint_id=path)
        loaded[path.name] = state["weight"].full_tensor(), state["step"].item()
    dist.destroy_process_group()
    return loaded


def test_each_rank_saves_its_slices_of_each_step(tmp_path: Path) -> None:
    """Though the state changes as soon as it may, files have their step's state, and load in another layout."""
    loaded = run_ranks(_save_and_load, 2, tmp_path)[0]
    assert loaded.keys() == {f"{name}-{step}" for name in STAGERS for step in (1, 2)}
    for name, (weight, number) in loaded.items():
        step = int(name[-1])
        assert number == step and torch.equal(weight, WHOLE * step), name
