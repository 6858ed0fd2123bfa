"""Tensors spread over ranks: into their parts, back into wholes, and loaded from a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from drawloom.components.ports.slices import is_dtensor
from drawloom.components.storage.tensor_source import InMemoryTensors
from drawloom.components.weights.convert import compute_group_output_specs, convert_tensors
from drawloom.components.weights.load import fill_module_from_folder
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import distribute, distribute_like, gather_dtensor, identity, stack
from support.processes import run_ranks

WHOLE = torch.arange(15.0).view(5, 3)


def _spread(mesh: Any) -> dict[str, Any]:
    mapper = distribute("a", mesh, [Shard(0)])
    part = convert_tensors(mapper, {"a": WHOLE})["a"]
    return {
        "part": part.to_local().tolist(),  # type: ignore[attr-defined]
        "kept": part.to_local().untyped_storage().nbytes(),  # type: ignore[attr-defined]
        "gathered": convert_tensors(gather_dtensor("a"), {"a": part})["a"].tolist(),
        "back": convert_tensors(mapper.inverse(), {"a": part})["a"].tolist(),
    }


def _stack_tensors(mesh: Any) -> dict[str, Any]:
    spread = parallel(distribute("a", mesh, [Shard(1)]), distribute("b", mesh, [Shard(1)]))
    tensors = convert_tensors(spread, {"a": WHOLE, "b": WHOLE + 1})
    mapper = sequential(parallel(gather_dtensor("a"), gather_dtensor("b")), stack(["b", "a"], "ba"))
    kind = compute_group_output_specs(mapper.groups[0], InMemoryTensors(tensors).specs())["ba"]
    return {"kind": (kind.shape, str(kind.dtype)), "made": convert_tensors(mapper, tensors)["ba"].tolist()}


def _load_sharded(mesh: Any, folder: Path, device: str) -> dict[str, Any]:
    module: Any = nn.Module()
    for name, placement in (("a", Shard(0)), ("b", Replicate())):
        empty = torch.empty(5, 3, device=device)
        spread = convert_tensors(distribute(name, mesh, [placement]), {name: empty})[name]
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
    return {"spread": _spread(mesh), "stacked": _stack_tensors(mesh), **loaded}


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
    assert all(record["gathered"] == record["back"] == WHOLE.tolist() for record in spread)


def test_specs_of_gathered_tensors_are_known_before_reading(ranks: list[dict[str, Any]]) -> None:
    """Shapes are the whole tensors', computed without a message between ranks."""
    expected = {"kind": ((2, 5, 3), "torch.float32"), "made": torch.stack([WHOLE + 1, WHOLE]).tolist()}
    assert [rank["stacked"] for rank in ranks] == [expected] * 2


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sharded_parameters_are_loaded(ranks: list[dict[str, Any]], device: str) -> None:
    """Ranks fill their parts from the folder, also on the meta device; the parameters stay sharded."""
    rest = [(WHOLE + 1).tolist(), (WHOLE + 2).tolist()]
    assert [rank[device]["values"] for rank in ranks] == [[WHOLE[:3].tolist(), *rest], [WHOLE[3:].tolist(), *rest]]
    assert all(rank[device]["sharded"] == [True, True, False] for rank in ranks)
    assert all(rank[device]["placements"] == "(Shard(dim=0),)" for rank in ranks)


def test_whole_tensors_stay_whole() -> None:
    """Ordinary tensors are unchanged by gather and like, without a process group."""
    assert convert_tensors(gather_dtensor("a"), {"a": WHOLE})["a"] is WHOLE
    assert convert_tensors(distribute_like("a", WHOLE), {"a": WHOLE})["a"] is WHOLE
