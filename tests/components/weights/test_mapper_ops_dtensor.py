"""Tensors spread over ranks: into their parts, and loaded from a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drawloom.components.ports.slices import is_dtensor
from drawloom.components.weights.load import convert_tensors
from drawloom.components.weights.mapper import distribute_like, identity
from support.processes import run_ranks
from support.weight_folders import fill_module_from_folder

WHOLE = torch.arange(15.0).view(5, 3)


def _spread(mesh: Any) -> dict[str, Any]:
    like = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    part = convert_tensors(distribute_like("a", like), {"a": WHOLE})["a"]
    return {
        "part": part.to_local().tolist(),  # type: ignore[attr-defined]
        "kept": part.to_local().untyped_storage().nbytes(),  # type: ignore[attr-defined]
        "gathered": part.full_tensor().tolist(),  # type: ignore[attr-defined]
    }


def _load_sharded(mesh: Any, folder: Path, device: str) -> dict[str, Any]:
    module: Any = nn.Module()
    for name, placement in (("a", Shard(0)), ("b", Replicate())):
        empty = torch.empty(5, 3, device=device)
        spread = distribute_tensor(empty, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread))
    module.register_parameter("c", nn.Parameter(torch.empty(5, 3, device="meta")))
    fill_module_from_folder(folder, module, identity("a", "b", "c"))
    return {
        "sharded": [is_dtensor(parameter) for parameter in module.parameters()],
        "placements": str(module.a.placements),
        "values": [module.a.to_local().tolist(), module.b.to_local().tolist(), module.c.tolist()],
    }


def _all(folder: Path) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    loaded = {device: _load_sharded(mesh, folder, device) for device in ("meta", "cpu")}
    return {"spread": _spread(mesh), **loaded}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return two processes' results."""
    folder = tmp_path_factory.mktemp("model")
    save_file({"a": WHOLE, "b": WHOLE + 1, "c": WHOLE + 2}, folder / "model.safetensors")
    return run_ranks(_all, 2, folder)


def test_distributed_tensors_are_gathered_whole(ranks: list[dict[str, Any]]) -> None:
    """Ranks keep their rows and no more memory; gathered, all ranks have the whole tensor again."""
    spread = [rank["spread"] for rank in ranks]
    assert [record["part"] for record in spread] == [WHOLE[:3].tolist(), WHOLE[3:].tolist()]
    assert [record["kept"] for record in spread] == [36, 24]
    assert all(record["gathered"] == WHOLE.tolist() for record in spread)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sharded_parameters_are_loaded(ranks: list[dict[str, Any]], device: str) -> None:
    """Ranks fill their parts from the folder, also on the meta device; the parameters stay sharded."""
    rest = [(WHOLE + 1).tolist(), (WHOLE + 2).tolist()]
    assert [rank[device]["values"] for rank in ranks] == [[WHOLE[:3].tolist(), *rest], [WHOLE[3:].tolist(), *rest]]
    assert all(rank[device]["sharded"] == [True, True, False] for rank in ranks)
    assert all(rank[device]["placements"] == "(Shard(dim=0),)" for rank in ranks)


def test_whole_tensors_stay_whole() -> None:
    """Ordinary tensors are unchanged, without a process group."""
    assert convert_tensors(distribute_like("a", WHOLE), {"a": WHOLE})["a"] is WHOLE
