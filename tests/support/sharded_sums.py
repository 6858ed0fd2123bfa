"""Steps of a sharded model, and the results of one process for each rank's rows."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.float8.training import Float8Training
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.overlap.shard_copies import CopiedShards
from drawloom.components.parallel import shard_unit
from drawloom.components.ports.model import TokenContext
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.joined import join_processes
from support.qwen3 import kernels_on
from support.steps import pass_on_gradients, prepare_weights

Rows = tuple[Tensor, dict[str, Tensor]]
"""Logits, and gradients of weights by name, on the CPU."""


@attrs.frozen
class Case:
    """
    A model of these sizes in some precision, with these settings of float8 if any.

    Each step's rows have `length` tokens, different ones on each rank.
    """

    sizes: dict[str, Any]
    precision: dict[str, Any]
    kind: Any = "cpu"
    length: int = 6
    steps: int = 1
    float8: dict[str, Any] | None = None
    copied: bool = False
    """Whether ranks copy shards from shared memory."""

    def rows(self, step: int, rank: int) -> Tensor:
        """Return one row (1, length) of tokens."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(self.sizes["vocab_size"], (1, self.length), generator=generator)


def _stages(case: Case, processes: TorchProcesses, device: ComputeDevice, **settings: Any) -> MaterializedStages:
    mesh = RankMesh(processes=processes, data_shard=processes.world_size)
    mesh.open()
    stages = MaterializedStages(
        model=Qwen3Dense(kernels=kernels_on(device.device), **case.sizes),
        loss=pipelines.TemperedLoss(),
        schedule=pipelines.schedule("one_f_one_b"),
        mesh=mesh,
        device=device,
        precision=DtypePolicy(**case.precision),
        job=pipelines.Job(),
        features=[
            *([] if case.float8 is None else [Float8Training(device=device, **case.float8)]),
            *(
                [CopiedShards(mesh=mesh, precision=DtypePolicy(**case.precision))]
                if case.copied and mesh.shard_group.size > 1
                else []
            ),
        ],
        **settings,
    )
    stages.open()
    return stages


def _logits(stages: MaterializedStages, rows: Tensor) -> Any:
    [stage] = stages.local
    rows = rows.to(next(iter(stage.module.parameters())).device)
    context = TokenContext(rows, torch.arange(rows.shape[1], device=rows.device)[None])
    return stage.module(rows, context, lambda hidden, head: head.logits(hidden))


def _gradients(stages: MaterializedStages) -> dict[str, Tensor]:
    gradients = {
        name: parameter.grad.cpu() for name, parameter in stages.named_parameters() if parameter.grad is not None
    }
    for _, parameter in stages.named_parameters():
        parameter.grad = None
    return {name: gradient for name, gradient in gradients.items() if not name.startswith("loss.")}


def on_shards(case: Case, small: int, by_block: bool) -> list[tuple[Tensor, Rows]]:
    """
    Return by step the logits of this rank's rows, without a gather by the program and with it, and slices of gradients.
    """
    shard_unit.PACKED_BELOW_BYTES = small
    with join_processes(case.kind, timeout=60.0) as (processes, device):
        stages = _stages(case, processes, device, reshard_after_forward=by_block)
        shards: Any = stages.local[0].shards
        results = []
        for step in range(case.steps):
            rows = case.rows(step, processes.rank)
            prepare_weights(stages)
            with torch.no_grad():
                unprepared = _logits(stages, rows)
            prepare_weights(stages)
            shards.start_unshard()
            shards.reduce_in_next_backward(is_last_in_step=True)
            prepared = _logits(stages, rows)
            prepared.square().sum().backward()
            pass_on_gradients(stages)
            results.append((unprepared.cpu(), (prepared.detach().cpu(), _gradients(stages))))
        return results


def alone(case: Case, ranks: int) -> list[list[Rows]]:
    """Return by step and rank the logits and gradients of one process, for that rank's rows."""
    with join_processes(case.kind, timeout=60.0) as (processes, device):
        stages = _stages(case, processes, device)
        results = []
        for step in range(case.steps):
            results_by_rank: list[Rows] = []
            for rank in range(ranks):
                prepare_weights(stages)
                logits = _logits(stages, case.rows(step, rank))
                logits.square().sum().backward()
                pass_on_gradients(stages)
                results_by_rank.append((logits.detach().cpu(), _gradients(stages)))
            results.append(results_by_rank)
        return results


def slice_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's rows of a tensor of any shape."""
    rows = -(-len(tensor) // ranks)
    return tensor[rank * rows : (rank + 1) * rows]


def assert_same(
    results_by_rank: list[list[tuple[Tensor, Rows]]], expected_steps: list[list[Rows]], **close: Any
) -> None:
    """
    Assert that each rank's logits equal one process's, and gradients the rounded float32 sums over all ranks' rows.
    """
    for step, expected_by_rank in enumerate(expected_steps):
        names = expected_by_rank[0][1]
        sums = {
            name: torch.stack([rows[1][name].float() for rows in expected_by_rank]).sum(0).to(gradient.dtype)
            for name, gradient in names.items()
        }
        for rank, results in enumerate(results_by_rank):
            unprepared, (prepared, slices) = results[step]
            for logits in (unprepared, prepared):
                torch.testing.assert_close(logits, expected_by_rank[rank][0], **close)
            assert slices.keys() == sums.keys()
            for name, gradient_slice in slices.items():
                expected = slice_of(sums[name], rank, len(results_by_rank))
                torch.testing.assert_close(
                    gradient_slice, expected, msg=f"the gradient of {name} in step {step}", **close
                )
