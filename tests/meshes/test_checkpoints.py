"""Checkpoints saved on one mesh and loaded on another, and optimizer steps on every mesh."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.rng import create_generator
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
from drawloom.components.ports.stages import get_or_create_gradient
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
ALL_MESHES = [(ranks, mesh) for ranks, meshes in MESHES.items() for mesh in meshes]
OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "muon": Muon, "stochastic": StochasticAdamW}


def _nodes(mesh: RankMesh, device: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": 6, "num_attention_heads": 2, "head_dim": 4, "intermediate_size": 14}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [0, 3]}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 11, "tie_word_embeddings": True}
    kernels = cpu_kernels()
    model = Qwen3Moe(kernels=kernels, **sizes)
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
    """Return this rank's weights, moments and averages, and their slices."""
    moments = nodes["optimizer"].state_dict()
    return {
        "slices": {**nodes["stages"].state_slices()},
        "weights": {name: part.clone() for name, part in nodes["stages"].state_dict().items()},
        "average": dict(nodes["ema"].averages()),
        **{key: {name: part[key].clone() for name, part in moments.items()} for key in ("exp_avg", "exp_avg_sq")},
    }


def _take_steps_on_meshes(meshes: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return this rank's slices, and its weights after every optimizer's steps, on every mesh."""
    weights_by_mesh = []
    with join_processes() as (processes, device):
        for sizes in meshes:
            mesh = RankMesh(processes=processes, **{"data_replicate": 1, **sizes})
            mesh.open()
            stages = _nodes(mesh, device)["stages"]
            weights_by_mesh.append({"slices": {**stages.state_slices()}, **_take_steps(stages, mesh, device)})
    return weights_by_mesh


def _take_steps(stages: Any, mesh: RankMesh, device: Any) -> dict[str, dict[str, Any]]:
    """Take two steps with every optimizer and mesh-independent gradients, and return this rank's weights."""
    weights_by_optimizer: dict[str, dict[str, Any]] = {}
    slices = stages.parameter_slices()
    before = {name: part.detach().clone() for name, part in stages.named_parameters()}
    for kind, use in OPTIMIZERS.items():
        more = {"job": pipelines.Job(), "device": device} if kind == "stochastic" else {}
        optimizer = use(parameters=stages, mesh=mesh, lr=0.1, **more)
        optimizer.open()
        for number in (1, 2):
            for name, parameter in stages.named_parameters():
                tensor_slice = slices[name] or TensorSlice.whole(tuple(parameter.shape))
                whole = torch.randn(tensor_slice.shape, generator=create_generator(number, name))
                get_or_create_gradient(parameter).copy_(whole[tensor_slice.index()])
            optimizer.run_phase(Step(number, 2))
        weights_by_optimizer[kind] = {name: part.detach().clone() for name, part in stages.named_parameters()}
        for name, part in stages.named_parameters():
            part.data.copy_(before[name])
    return weights_by_optimizer


def _save_or_load(folders: list[tuple[Path, Mapping[str, int], bool]]) -> list[dict[str, Any]]:
    """Take a step and save, or restore, in every folder on its mesh, and return this rank's states."""
    states = []
    with join_processes() as (processes, device):
        for folder, sizes, saves in folders:
            mesh = RankMesh(processes=processes, **{"data_replicate": 1, **sizes})
            mesh.open()
            nodes = _nodes(mesh, device)
            if saves:
                for name, parameter in nodes["stages"].named_parameters():
                    get_or_create_gradient(parameter).fill_(len(name) / 100)
                nodes["optimizer"].run_phase(Step(1, 1))
                nodes["ema"].run_phase(Step(1, 1))
            node = checkpointer(folder, nodes, mesh)
            if saves:
                node.save(Step(1, 9))
            elif node.restore() != 1:
                raise ValueError("there is no checkpoint")
            states.append(_state(nodes))
        return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[dict[str, Any]]]]:
    """Save a checkpoint on every mesh in a folder with the mesh's number, and return all ranks' states."""
    folder = tmp_path_factory.mktemp("saved")
    work: dict[int, list[tuple[Path, Mapping[str, int], bool]]] = {ranks: [] for ranks in MESHES}
    for number, (ranks, mesh) in enumerate(ALL_MESHES):
        work[ranks].append((folder / str(number), mesh, True))
    states: dict[int, Any] = {}
    for ranks, jobs in work.items():
        parts = run_ranks(_save_or_load, ranks, jobs, timeout=120)
        for position, (path, _, _) in enumerate(jobs):
            states[int(path.name)] = [part[position] for part in parts]
    return folder, states


@pytest.mark.soak
def test_every_optimizer_takes_the_same_steps_on_any_mesh() -> None:
    """
    Equal gradients result in one process's weights on every mesh, also if a rank has no row of a weight.

    Weights of Muon and of stochastic rounding are bitwise equal: noise and matrix products do not depend on the slices.
    For other optimizers torch's CPU kernels round the last elements of a slice differently.
    """
    states = [
        parts
        for ranks, meshes in MESHES.items()
        for parts in zip(*run_ranks(_take_steps_on_meshes, ranks, meshes, timeout=120), strict=True)
    ]
    assert any(
        tensor_slice is not None and not tensor_slice.numel
        for state in states[6]
        for tensor_slice in state["slices"].values()
    )
    for kind in OPTIMIZERS:
        whole = pipelines.assemble(states[0], kind)
        tolerance = 0.0 if kind in ("muon", "stochastic") else 1e-6
        for number, parts in enumerate(states):
            for name, tensor in pipelines.assemble(parts, kind).items():
                torch.testing.assert_close(
                    tensor, whole[name], rtol=0, atol=tolerance, msg=f"{kind} {ALL_MESHES[number]} {name}"
                )


def test_weights_and_moments_are_bitwise_the_same_on_another_mesh(
    saved: tuple[Path, dict[int, list[dict[str, Any]]]],
) -> None:
    """For eight random pairs of meshes the loaded state is bitwise the saved one, and every element is saved once."""
    folder, states = saved
    pairs = random.Random(5).sample(
        [(a, b) for a in range(len(ALL_MESHES)) for b in range(len(ALL_MESHES)) if a != b], 8
    )
    for ranks in MESHES:
        loads = [(a, b) for a, b in pairs if ALL_MESHES[b][0] == ranks]
        jobs = [(folder / str(a), ALL_MESHES[b][1], False) for a, b in loads]
        parts = run_ranks(_save_or_load, ranks, jobs, timeout=120) if jobs else []
        for position, (a, _) in enumerate(loads):
            loaded = [part[position] for part in parts]
            for kind in ("weights", "exp_avg", "exp_avg_sq", "average"):
                expected = pipelines.assemble(states[a], kind)
                for name, tensor in pipelines.assemble(loaded, kind).items():
                    assert tensor is not None and torch.equal(tensor, expected[name]), (a, kind, name)  # type: ignore[arg-type]
    assert len({_count_elements(folder / str(number) / "checkpoints/step-1") for number in range(len(ALL_MESHES))}) == 1


def _count_elements(checkpoint: Path) -> int:
    """Return the number of elements in a checkpoint's files, without counters, which are saved per slice."""
    tensors = (load_file(path).values() for path in checkpoint.glob("*.safetensors"))
    return sum(tensor.numel() for values in tensors for tensor in values if tensor.ndim)
