"""Products of tensor-parallel ranks beside their exchanges."""

from typing import Any

import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.overlap.products import multiply_and_scatter, multiply_gathered
from drawloom.components.parallel.tensor_ranks import TensorRanks
from drawloom.kernels.deferral import Deferral
from support.processes import run_ranks

TOKENS, WIDTH, INNER = 4, 6, 5


def compare_on_rank() -> dict[str, list[float]]:
    """Return the largest differences from exchanges before and after the products, by dtype."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=60.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, tensor=processes.world_size, data_replicate=1)
        mesh.open()
        differences: dict[str, list[float]] = {}
        for dtype in (torch.float64, torch.bfloat16):
            torch.manual_seed(mesh.world.rank)
            given = [torch.randn(shape).to(dtype) for shape in ((TOKENS, WIDTH), *[(INNER, WIDTH)] * 2, (WIDTH, INNER))]
            weight = torch.randn(TOKENS, WIDTH).to(dtype)
            results = [
                run(TensorRanks(mesh.tensor_group), *(tensor.clone().requires_grad_() for tensor in given), weight)
                for run in (compute_beside_exchanges, compute_between_exchanges)
            ]
            differences[str(dtype)] = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
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


def compute_beside_exchanges(
    ranks: TensorRanks, own: Tensor, gate: Tensor, up: Tensor, down: Tensor, grad: Tensor
) -> Any:
    """Return the same from products beside exchanges; a second pass defers the weights' gradients."""
    passes = []
    for deferral in (None, Deferral()):
        with deferral or torch.enable_grad():
            gates, ups = multiply_gathered(own, (gate, up), ranks.group)
            output = multiply_and_scatter(gates.sigmoid() * ups, down, ranks.group)
        if deferral is None:
            passes.append([output, *torch.autograd.grad(output, (own, gate, up, down), grad)])
        else:
            with deferral.defer():
                output.backward(grad)
            assert gate.grad is None and down.grad is None
            weights = {
                id(item.weight): item.drain_and_return_remaining_grad() for item in deferral.take_queued_gradients()
            }
            passes.append([output, own.grad, *(weights[id(weight)] for weight in (gate, up, down))])
    assert all(torch.equal(first, second) for first, second in zip(*passes, strict=True))
    return passes[0]


def test_products_beside_exchanges_equal_products_between_them() -> None:
    """With two and three ranks, results and gradients are those of a gather, products and a reduce-scatter."""
    for ranks in (2, 3):
        for differences in run_ranks(compare_on_rank, ranks):
            assert max(differences["torch.float64"]) < 1e-14
            assert max(differences["torch.bfloat16"]) < 0.25  # sums of 12 products are rounded once less
