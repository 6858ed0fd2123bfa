"""Checkpoints that are saved on one mesh and loaded on another, and steps of optimizers on each."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.rng import generator
from drawloom.components.experts.all_to_all import AllToAllExperts
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.optim.adam import Adam
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.phases.ema import WeightAverage
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import gradient_of
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.checkpoints import checkpointer
from support.joined import join_processes
from support.processes import run_ranks
from support.qwen3 import cpu_kernels

MESHES: dict[int, list[Mapping[str, int]]] = {
    1: [{}],
    2: [{"data_shard": 2}, {"pipeline": 2}, {"data_replicate": 2}, {"tensor": 2}, {"data_shard": 2, "expert": 2}],
    4: [
        {"data_shard": 4},
        {"data_shard": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 2},
        {"data_replicate": 2, "data_shard": 2},
        {"pipeline": 2, "data_shard": 2},
        {"pipeline": 2, "data_replicate": 2},
        {"data_shard": 4, "expert": 2},
        {"data_replicate": 2, "data_shard": 2, "expert": 2},
        {"pipeline": 2, "tensor": 2, "expert": 2},
        {"data_replicate": 4, "expert": 4},
        {"data_replicate": 2, "data_shard": 2, "expert": 4},
    ],
}
ALL = [(ranks, mesh) for ranks, meshes in MESHES.items() for mesh in meshes]
OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "muon": Muon, "stochastic": StochasticAdamW}


def _nodes(mesh: RankMesh, device: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": 6, "num_attention_heads": 2, "head_dim": 4, "intermediate_size": 14}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [0, 3]}
    kernels = cpu_kernels()
    model = Qwen3Moe(kernels=kernels, num_hidden_layers=4, vocab_size=11, tie_word_embeddings=True, **sizes)
    stages = MaterializedStages(
        model=model,
        loss=NextToken(),
        schedule=pipelines.schedule("one_f_one_b"),
        mesh=mesh,
        device=device,
        precision=DtypePolicy(),
        job=pipelines.Job(),
        dispatcher=AllToAllExperts(kernels=kernels, mesh=mesh),
    )
    stages.open()
    optimizer = AdamW(parameters=stages, mesh=mesh, lr=1e-3, groups=pipelines.GROUPS)
    optimizer.open()
    return {"stages": stages, "optimizer": optimizer, "ema": WeightAverage(parameters=stages)}


def _state(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Weights and moments of this rank, and of which slices they are."""
    moments = nodes["optimizer"].state_dict()
    return {
        "slices": {**nodes["stages"].state_slices()},
        "weights": {name: part.clone() for name, part in nodes["stages"].state_dict().items()},
        "average": dict(nodes["ema"].averages()),
        **{key: {name: part[key].clone() for name, part in moments.items()} for key in ("exp_avg", "exp_avg_sq")},
    }


def _stepped(stages: Any, mesh: RankMesh, device: Any) -> dict[str, dict[str, Any]]:
    """This rank's weights after two steps of each optimizer, with gradients that every mesh has."""
    found: dict[str, dict[str, Any]] = {}
    places = stages.slices()
    before = {name: part.detach().clone() for name, part in stages.named_parameters()}
    for kind, use in OPTIMIZERS.items():
        more = {"job": pipelines.Job(), "device": device} if kind == "stochastic" else {}
        optimizer = use(parameters=stages, mesh=mesh, lr=0.1, **more)
        optimizer.open()
        for number in (1, 2):
            for name, parameter in stages.named_parameters():
                place = places[name] or TensorSlice.whole(tuple(parameter.shape))
                whole = torch.randn(place.shape, generator=generator(number, name))
                gradient_of(parameter).copy_(whole[place.index()])
            optimizer.run_phase(Step(number, 2))
        found[kind] = {name: part.detach().clone() for name, part in stages.named_parameters()}
        for name, part in stages.named_parameters():
            part.data.copy_(before[name])
    return found


def _saved_or_loaded(folders: list[tuple[Path, Mapping[str, int], bool]]) -> list[dict[str, Any]]:
    """Of each folder, on its mesh: take a step and save, or restore; this rank's state afterwards."""
    found = []
    with join_processes() as (processes, device):
        for folder, sizes, saves in folders:
            mesh = RankMesh(processes=processes, **{"data_replicate": 1, **sizes})
            mesh.open()
            nodes = _nodes(mesh, device)
            if saves:
                for name, parameter in nodes["stages"].named_parameters():
                    gradient_of(parameter).fill_(len(name) / 100)
                nodes["optimizer"].run_phase(Step(1, 1))
                nodes["ema"].run_phase(Step(1, 1))
            node = checkpointer(folder, nodes, mesh)
            if saves:
                node.save(Step(1, 9))
            elif node.restore() != 1:
                raise ValueError("there is no checkpoint")
            found.append(_state(nodes))
            if saves:
                found[-1] |= _stepped(nodes["stages"], mesh, device)
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """A folder with a checkpoint of each mesh, under its number, and the states of its ranks."""
    folder = tmp_path_factory.mktemp("saved")
    work: dict[int, list[tuple[Path, Mapping[str, int], bool]]] = {ranks: [] for ranks in MESHES}
    for number, (ranks, mesh) in enumerate(ALL):
        work[ranks].append((folder / str(number), mesh, True))
    states: dict[int, Any] = {}
    for ranks, jobs in work.items():
        parts = run_ranks(_saved_or_loaded, ranks, jobs, timeout=120)
        for place, (path, _, _) in enumerate(jobs):
            states[int(path.name)] = [part[place] for part in parts]
    return folder, states


def test_every_optimizer_takes_the_same_steps_on_any_mesh(saved: tuple[Path, dict[int, list[dict[str, Any]]]]) -> None:
    """
    From equal gradients weights are those of one process, also where a rank has no row of a weight.

    Those that are rounded stochastically, and Muon's, are so to the bit: noise and products of matrices do not depend
    on who has which part. torch's kernels on a CPU round the last elements of a slice otherwise than those before.
    """
    _, states = saved
    assert any(place is not None and not place.numel for each in states[6] for place in each["slices"].values())
    for kind in OPTIMIZERS:
        whole = pipelines.assemble(states[0], kind)
        close = 0.0 if kind in ("muon", "stochastic") else 1e-6
        for number, parts in states.items():
            for name, tensor in pipelines.assemble(parts, kind).items():
                torch.testing.assert_close(tensor, whole[name], rtol=0, atol=close, msg=f"{kind} {ALL[number]} {name}")


def test_weights_and_moments_are_bitwise_the_same_on_another_mesh(
    saved: tuple[Path, dict[int, list[dict[str, Any]]]],
) -> None:
    """Sixteen random pairs of meshes: what is loaded is what was saved, to the bit, and each element is saved once."""
    folder, states = saved
    pairs = random.Random(5).sample([(a, b) for a in range(len(ALL)) for b in range(len(ALL)) if a != b], 16)
    for ranks in MESHES:
        mine = [(a, b) for a, b in pairs if ALL[b][0] == ranks]
        jobs = [(folder / str(a), ALL[b][1], False) for a, b in mine]
        parts = run_ranks(_saved_or_loaded, ranks, jobs, timeout=120) if jobs else []
        for place, (a, _) in enumerate(mine):
            loaded = [part[place] for part in parts]
            for what in ("weights", "exp_avg", "exp_avg_sq", "average"):
                expected = pipelines.assemble(states[a], what)
                for name, tensor in pipelines.assemble(loaded, what).items():
                    assert tensor is not None and torch.equal(tensor, expected[name]), (a, what, name)  # type: ignore[arg-type]
    assert len({_elements(folder / str(number) / "checkpoints/step-1") for number in range(len(ALL))}) == 1


def _elements(checkpoint: Path) -> int:
    """How many elements all files of a checkpoint have, without counters, which each slice has."""
    tensors = (load_file(path).values() for path in checkpoint.glob("*.safetensors"))
    return sum(tensor.numel() for found in tensors for tensor in found if tensor.ndim)
