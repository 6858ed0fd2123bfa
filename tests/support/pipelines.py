"""A small model over pipeline ranks, and what a step of it leaves behind."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.loss.dft import Dft
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.pipeline.executor import Executor
from drawloom.components.pipeline.stages import MaterializedStages
from drawloom.components.ports.data import IGNORE_INDEX, Batch
from drawloom.components.ports.model import Head
from drawloom.components.ports.run import Step
from drawloom.graph.problems import Problem
from drawloom.graph.registry.registry import Registry
from support.qwen3 import cpu_kernels

TRAINING = [
    name.rpartition(".")[2]
    for name in Registry.of("drawloom.components").names()
    if name.startswith("pipeline.schedules.")
]
"""The names of all schedules."""


@attrs.frozen
class Job:
    """A run."""

    name: str = "test"
    seed: int = 3
    path: Any = None


class FreezeFirstLayer:
    """A transform: layer 0 is not trained."""

    def transform(self, module: Any) -> Any:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("model.layers.0."))
        return module


def schedule(name: str, **settings: Any) -> Any:
    """A schedule by the last part of its name."""
    spec = Registry.of("drawloom.components").find(f"pipeline.schedules.{name}")
    assert not isinstance(spec, Problem), spec
    return spec.cls(**settings)


def batches(count: int) -> list[Batch]:
    """Microbatches whose lengths differ, with documents and ignored targets."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        length = 4 + number % 3
        tokens = torch.randint(0, 20, (2, length), generator=generator)
        targets = torch.randint(0, 20, (2, length), generator=generator)
        targets[:, 1] = IGNORE_INDEX
        positions = torch.arange(length).expand(2, length).contiguous()
        weights = torch.rand(targets.shape, generator=generator).masked_fill(targets == IGNORE_INDEX, 0)
        made.append(Batch(tokens, targets, positions, torch.zeros_like(tokens), weights))
    return made


class Temperature(nn.Module):
    """A trained number that logits are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.log)


class TemperedLoss(NextToken):
    """A loss with a parameter of its own, which takes logits chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Temperature()

    def loss(self, hidden: Tensor, head: Head, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        losses = head.map_logits(self._losses, hidden, batch.targets, max_bytes=500)
        return (losses * batch.weights).sum(), batch.weights.sum(), {"squares": losses.detach().square().sum()}

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        tempered = logits / self.module.log.exp()
        return F.cross_entropy(tempered, targets, ignore_index=IGNORE_INDEX, reduction="none")


LOSSES: dict[str, Callable[[], Any]] = {
    "plain": NextToken,
    "smoothed": partial(NextToken, z_loss=0.1, label_smoothing=0.2, accuracy=True),
    "dft": Dft,
    "tempered": TemperedLoss,
}

Case = tuple[str, int, bool, bool, str]
"""
A schedule, how many microbatches, whether embedding and head are tied, whether the first layer is frozen, and the name
of a loss.
"""


FLOAT64 = {"parameter": "float64"}  # sums stay in float64
MIXED = {"parameter": "float32", "compute": "bfloat16"}


def steps(
    cases: list[Case],
    replicas: int = 1,
    kind: Literal["cpu", "cuda"] = "cpu",
    dtypes: Mapping[str, Any] = FLOAT64,
    layers: int = 8,
) -> list[dict[str, Any]]:
    """
    What a step of each case leaves on this rank, in all processes that were started together, or in this one; the model
    has so many layers.

    With several replicas each takes its part of the microbatches, and gradients are summed over replicas, too.
    """
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device, timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=processes.world_size // replicas, data_replicate=replicas)
        mesh.open()
        return [_step(*case, mesh, device, DtypePolicy(**dtypes), layers) for case in cases]
    finally:
        processes.close()


def _step(
    name: str,
    microbatches: int,
    tied: bool,
    frozen: bool,
    kind: str,
    mesh: RankMesh,
    device: Any,
    precision: DtypePolicy,
    layers: int,
) -> dict[str, Any]:
    """Gradients by name, as the optimizer gets them; this rank's loss and sums, and its validation loss."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": 20,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
    }
    stages = MaterializedStages(
        model=Qwen3Dense(kernels=cpu_kernels(), tie_word_embeddings=tied, **sizes),
        loss=LOSSES[kind](),
        schedule=schedule(name),
        mesh=mesh,
        device=device,
        precision=precision,
        job=Job(),
        transforms=[FreezeFirstLayer()] if frozen else [],
    )
    stages.open()
    executor = Executor(
        stages=stages,
        boundaries=stages,
        schedule=stages.schedule,
        objective=stages.loss,
        mesh=mesh,
        neighbours=mesh,
        device=device,
    )
    executor.open()
    share, first = microbatches // mesh.size("data_replicate"), mesh.index("data_replicate")
    losses = executor.train(batches(microbatches)[first * share : (first + 1) * share])
    step = Step(1, 1, outputs={"losses": losses})
    Synchronize(
        parameters=stages, mesh=mesh, precision=precision, reduce=SumOverParameters(mesh=mesh), bucket_bytes=1000
    ).run_phase(step)
    held_out = executor.evaluate(iter(batches(3)))
    grads = {name: None if parameter.grad is None else parameter.grad.cpu() for name, parameter in stages.named()}
    sums = {key: float(value) for key, value in losses.sums.items()}
    return {"grads": grads, "loss": float(losses.total), "sums": sums, "held_out": float(held_out.total)}
