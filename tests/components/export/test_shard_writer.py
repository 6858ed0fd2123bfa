"""Several ranks write one folder: each tensor once, the same under any hash seed, or nothing at all."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.export.shard_writer import (
    Share,
    gather_tensors_on_first_rank,
    make_share,
    write_safetensors_folder_collectively,
)
from drawloom.components.ports.slices import ModelParameter
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.weights.mapper import identity, parallel, stack
from drawloom.components.weights.save import PlannedFile
from drawloom.graph import UserError
from support.processes import run_ranks
from support.tensor_sources import InMemoryTensors

LAYERS = 6


def tensors() -> dict[str, Tensor]:
    """Some layers of a made-up model, all numbers different."""
    names = [f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in ("gate", "up", "norm")]
    return {name: torch.arange(8.0).view(2, 4) + 8 * number for number, name in enumerate(names)}


def parameters(named: dict[str, Tensor]) -> dict[str, ModelParameter]:
    """Return the same as parameters of a model."""
    return {name: ModelParameter(tensor) for name, tensor in named.items()}


def mapper() -> Mapper:
    """Return a mapper for joining the layers' gate and up."""
    layers = [f"layers.{layer}." for layer in range(LAYERS)]
    joined = (stack([f"{layer}gate", f"{layer}up"], f"{layer}gate_up") for layer in layers)
    return parallel(*joined, identity(*(f"{layer}norm" for layer in layers)))


def config_beside(folder: Path, files: list[PlannedFile]) -> None:
    """Write a config with the file count, once all files exist."""
    names = [file.name for file in files]
    assert {*names} <= {*os.listdir(folder)}
    (folder / "config.json").write_text(json.dumps(len(names)))


def by_one(folder: Path, max_shard: int = 2**30) -> dict[str, Tensor]:
    """Return the tensors written by a single process."""
    mine = make_share(parameters(tensors()), mapper(), range(2 * LAYERS), None)
    write_safetensors_folder_collectively(folder, mine, SingleProcess(), max_shard, config_beside)
    source = open_safetensors_folder(folder)
    return {name: source.tensor(name) for name in source.specs()}


def assert_same(folder: Path, expected: dict[str, Tensor]) -> None:
    """Assert that the folder has exactly the expected tensors, in exactly the files named by its index."""
    source = open_safetensors_folder(folder)
    assert source.specs().keys() == expected.keys()
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in expected.items())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {*os.listdir(folder)} == {*index["weight_map"].values(), "model.safetensors.index.json", "config.json"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def _world() -> TorchGroup:
    dist.init_process_group("gloo")
    return TorchGroup("world", range(dist.get_world_size()), dist.group.WORLD, torch.device("cpu"))


def _deal(folder: Path) -> None:
    """Distribute groups among ranks with the same tensors."""
    world = _world()
    dealt = Mapper(mapper().groups[world.rank :: world.size])
    write_safetensors_folder_collectively(
        folder, Share(InMemoryTensors(tensors()), dealt, dealt.outputs), world, 100, config_beside
    )


def test_a_group_of_replicas_shares_the_work(tmp_path: Path) -> None:
    """Three ranks write one third apiece, together one whole folder."""
    run_ranks(_deal, 3, tmp_path / "export")
    assert_same(tmp_path / "export", by_one(tmp_path / "alone"))
    assert sorted(os.listdir(tmp_path)) == ["alone", "export"]


def _gather() -> list[Any]:
    """Gather tensors from three ranks, after tensors that rank 1 fails to collect; return both outcomes."""
    world = _world()

    def collect_or_fail() -> dict[str, Tensor]:
        if world.rank == 1:
            raise TypeError("bad")
        return {}

    try:
        gather_tensors_on_first_rank(collect_or_fail, world)
        outcomes: list[Any] = ["fine"]
    except (UserError, TypeError) as error:
        outcomes = [str(error)]
    dtype = [torch.bfloat16, torch.float8_e4m3fn, torch.int64][world.rank]
    made = {f"{world.rank}.{number}": torch.arange(2 * number).view(number, 2).to(dtype).t() for number in range(2)}
    made[f"{world.rank}"] = torch.tensor(world.rank).to(dtype)
    gathered = gather_tensors_on_first_rank(lambda: made, world)
    return [*outcomes, {name: (str(part.dtype), part.float().tolist()) for name, part in gathered.items()}]


def test_the_first_rank_gathers_all_tensors() -> None:
    """They have any shape and dtype; an error on one rank is raised on all, which stay in step."""
    first, *others = run_ranks(_gather, 3)
    dtypes = ["torch.bfloat16", "torch.float8_e4m3fn", "torch.int64"]
    wanted: dict[str, Any] = {}
    for rank, dtype in enumerate(dtypes):
        wanted |= {f"{rank}.0": (dtype, [[], []]), f"{rank}.1": (dtype, [[0.0], [1.0]]), f"{rank}": (dtype, rank)}
    assert others == [["bad", {}], ["rank 1: TypeError: bad", {}]]
    assert first == ["rank 1: TypeError: bad", wanted]


def _trouble(folder: Path, kind: str) -> tuple[str, list[str]]:
    """Fail on rank 1; return this rank's error, and the remaining files."""
    world = _world()
    names = {"duplicate": "a", "name": "../a" if world.rank else "a"}.get(kind, f"t{world.rank}")
    source = InMemoryTensors({names: torch.ones(3)})
    if world.rank == 1 and kind == "disk":

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.pwrite = full

    def finish(aside: Path, _: list[PlannedFile]) -> None:
        if kind == "finish":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside / "config.json"))

    try:
        write_safetensors_folder_collectively(
            folder / "export", Share(source, identity(names), [names]), world, 100, finish
        )
    except UserError as error:
        return str(error), sorted(os.listdir(folder))
    return "fine", sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("duplicate", "a would be written twice, by rank 0 and by rank 1"),
        ("name", "'../a' is not a valid name of a tensor"),
        ("disk", "model-00002-of-00002.safetensors: No space left on device"),
        ("finish", "config.json: No space left on device"),
        ("taken", "exists already"),
    ],
)
def test_an_error_on_one_rank_leaves_nothing(tmp_path: Path, kind: str, message: str) -> None:
    """An error on any rank is raised on all, and the target folder is as it was before."""
    if kind == "taken":
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "stale.safetensors").write_text("old")
    before = sorted(os.listdir(tmp_path))
    (first, left), (second, _) = run_ranks(_trouble, 2, tmp_path, kind)
    assert message in first
    assert first == second
    assert left == before
    assert kind != "taken" or os.listdir(tmp_path / "export") == ["stale.safetensors"]


SHARDED = """
import os
import sys
from datetime import timedelta
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.export.shard_writer import make_share, write_safetensors_folder_collectively
import test_shard_writer as here
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,))
whole = here.tensors()
spread = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in whole.items()}
world = TorchGroup("world", [0, 1], dist.group.WORLD, torch.device("cpu"))
mapper = here.mapper()
mine = make_share(here.parameters(spread), mapper, [n for n in range(len(mapper.groups)) if n % 2 == rank], None)
write_safetensors_folder_collectively(Path(sys.argv[3]), mine, world, 100, here.config_beside)
os._exit(0)  # torch's threads do not always end in order
"""


@pytest.mark.soak
def test_sharded_tensors_are_the_same_under_every_hash_seed(tmp_path: Path) -> None:
    """Two processes with different string hashes gather the same tensors at a time: none gets another's name."""
    paths = [str(Path(__file__).parents[3] / "src"), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    arguments = [str(tmp_path / "store"), str(tmp_path / "export"), *paths]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), *arguments],
            env=os.environ | {"PYTHONHASHSEED": str(7 + rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert_same(tmp_path / "export", by_one(tmp_path / "alone"))


def test_tensors_can_be_exported_in_another_dtype(tmp_path: Path) -> None:
    """A share in another dtype is written in this dtype, and integers are left alone."""
    given = parameters({"a": torch.ones(2), "b": torch.tensor([1])})
    mine = make_share(given, identity("a", "b"), [0, 1], torch.bfloat16)
    write_safetensors_folder_collectively(tmp_path / "export", mine, SingleProcess(), 100, config_beside)
    kinds = open_safetensors_folder(tmp_path / "export").specs()
    assert {name: kind.dtype for name, kind in kinds.items()} == {"a": torch.bfloat16, "b": torch.int64}
