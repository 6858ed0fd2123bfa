"""Products of tensor-parallel ranks beside their exchanges."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.overlap.products import multiply_and_scatter, multiply_gathered
from drawloom.components.overlap.shifts import PeerShifts, Shifts
from drawloom.components.parallel.tensor_ranks import TensorRanks
from drawloom.kernels.deferral import Deferral
from support.processes import run_ranks


def compare_on_rank(kind: Literal["cpu", "cuda"], factor: int) -> dict[str, list[float]]:
    """
    Return differences from exchanges before and after the products, relative to the norm, by dtype.

    `factor` multiplies all sizes.
    """
    tokens, width, inner = (factor * size for size in (4, 6, 5))
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device, timeout=60.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, tensor=processes.world_size, data_replicate=1)
        mesh.open()
        differences: dict[str, list[float]] = {}
        for dtype in (torch.float64, torch.bfloat16):
            torch.manual_seed(mesh.world.rank)
            shapes = (tokens, width), (inner, width), (inner, width), (width, inner), (tokens, width)
            *given, grad = (torch.randn(shape, dtype=torch.float64).to(kind, dtype) for shape in shapes)
            results = [
                run(*(tensor.clone().requires_grad_() for tensor in given), grad)
                for run in (
                    partial(compute_between_exchanges, TensorRanks(mesh.tensor_group)),
                    partial(compute_beside_exchanges, mesh.tensor_group),
                    partial(compute_beside_exchanges, PeerShifts(mesh.tensor_group)),
                )
            ]
            expected, messages, memory = results
            assert all(torch.equal(first, second) for first, second in zip(messages, memory, strict=True))
            differences[str(dtype)] = [
                float((a - b).norm() / b.norm()) for a, b in zip(messages, expected, strict=True)
            ]
        return differences
    finally:
        processes.close()


def compute_between_exchanges(
    ranks: TensorRanks, own: Tensor, gate: Tensor, up: Tensor, down: Tensor, grad: Tensor
) -> Any:
    """Return the output and all gradients by torch's products between exchanges."""
    gathered = ranks.gather_tokens(own)
    output = ranks.reduce_scatter_tokens((gathered @ gate.t()).sigmoid() * (gathered @ up.t()) @ down.t())
    return output, *torch.autograd.grad(output, (own, gate, up, down), grad)


def compute_beside_exchanges(ranks: Shifts, own: Tensor, gate: Tensor, up: Tensor, down: Tensor, grad: Tensor) -> Any:
    """Return the same from products beside exchanges; a second pass defers the weights' gradients."""
    passes: list[list[Any]] = []
    for deferral in (None, Deferral()):
        with deferral or torch.enable_grad():
            gates, ups = multiply_gathered(own, (gate, up), ranks)
            output = multiply_and_scatter(gates.sigmoid() * ups, down, ranks)
        if deferral is None:
            passes.append([output, *torch.autograd.grad(output, (own, gate, up, down), grad)])
        else:
            with deferral.defer():
                output.backward(grad)  # type: ignore[no-untyped-call]
            assert gate.grad is None and down.grad is None
            weights = {
                id(item.weight): item.drain_and_return_remaining_grad() for item in deferral.take_queued_gradients()
            }
            passes.append([output, own.grad, *(weights[id(weight)] for weight in (gate, up, down))])
    assert all(torch.equal(first, second) for first, second in zip(*passes, strict=True))
    return passes[0]


def test_products_beside_exchanges_equal_products_between_them() -> None:
    """
    With two and three ranks, by messages and by shared memory, results and gradients equal products between
    a gather and a reduce-scatter.
    """
    for ranks in (2, 3):
        for differences in run_ranks(compare_on_rank, ranks, "cpu", 1):
            assert max(differences["torch.float64"]) < 1e-14
            assert max(differences["torch.bfloat16"]) < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_products_beside_exchanges_on_two_gpus() -> None:
    """Two GPUs have the same results by messages and by shared memory, whose slots are reused at once."""
    for differences in run_ranks(compare_on_rank, 2, "cuda", 256):
        assert max(differences["torch.float64"]) < 1e-12
        assert max(differences["torch.bfloat16"]) < 0.02
