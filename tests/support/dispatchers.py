"""Experts partitioned over several ranks, beside one rank with all experts and tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.model.decoder.experts import Experts
from drawloom.components.parallel.split_experts import set_dispatcher, split_experts
from drawloom.components.ports.experts import Dispatcher
from support.processes import run_ranks
from support.qwen3 import cpu_kernels, sparse

RANKS, EXPERTS, WIDTH = 3, 6, 8

# Of each rank the experts that its tokens choose; -1 is a dropped choice.
CHOICES: dict[str, list[list[list[int]]]] = {
    "every expert": [[[0, 3], [1, 4], [2, 5]], [[5, 0], [4, 1]], [[3, 2]]],
    "one expert": [[[2, 2]] * 7, [[2, 2]], [[2, 2]] * 3],
    "all tokens on one rank": [[[n % 6, (n + 1) % 6] for n in range(14)], [], []],
    "a rank without tokens and one without rows": [[], [[0, 1]] * 3, [[1, 0]] * 2],
    "dropped choices": [[[-1, 3], [-1, -1]], [[0, -1]], [[-1, 5], [2, -1]]],
    "no tokens": [[], [], []],
}


def experts_of(**changes: Any) -> Experts:
    """Build a layer's experts in float64 on the meta device."""
    model = sparse(num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=5, **changes)
    with torch.device("meta"):
        spec: Any = model.architecture.mlp_spec_of(0)
        return Experts(WIDTH, spec, model.kernels).double()


def make_random_weight(name: str) -> Tensor:
    """Return random numbers for a whole parameter, the same in every process."""
    shape = experts_of().get_parameter(name).shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def inputs(chosen: list[list[list[int]]], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states, choices and probabilities of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    count = len(chosen[rank])
    hidden = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    probabilities = torch.rand(count, 2, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, torch.tensor(chosen[rank], dtype=torch.int64).view(count, 2), probabilities


def run_experts(module: Experts, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> dict[str, Tensor]:
    """Return the experts' result and the gradients of their inputs and parameters."""
    result = module(hidden, chosen, probabilities)
    result.backward(result.detach().cos())
    grads = {name: part.grad for name, part in module.named_parameters()}
    tensors = {"result": result.detach(), "hidden": hidden.grad, "probabilities": probabilities.grad, **grads}
    assert all(tensor is not None for tensor in tensors.values())
    return tensors


Results = dict[str, list[dict[str, Tensor]]]


def run_on_ranks(dispatcher: Callable[..., Dispatcher]) -> Results:
    """Run every entry in CHOICES on three ranks with two experts each. Return a result per rank, by entry name."""
    results_by_rank = run_ranks(_run_choices, RANKS, dispatcher)
    return {name: [results[index] for results in results_by_rank] for index, name in enumerate(CHOICES)}


def _run_choices(dispatcher: Callable[..., Dispatcher]) -> list[dict[str, Tensor]]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, data_shard=RANKS, expert=RANKS)
        mesh.open()
        brings = dispatcher(kernels=cpu_kernels(), mesh=mesh)
        with torch.inference_mode():  # an evaluation may come before the first step
            brings.dispatch(*inputs(CHOICES["every expert"], mesh.world.rank), EXPERTS)
        results = []
        for chosen in CHOICES.values():
            module = experts_of()
            set_dispatcher(module, brings)
            splits = split_experts(module, mesh.expert_group)
            module.to_empty(device="cpu")
            for name, split in splits.items():
                module.get_parameter(name).data.copy_(make_random_weight(name)[split.tensor_slice.index()])
            results.append(run_experts(module, *inputs(chosen, mesh.world.rank)))
        return results
    finally:
        processes.close()


def assert_equal_to_one_rank(name: str, parts: list[dict[str, Tensor]]) -> None:
    """Assert that the joined parts of an entry in CHOICES equal the results and gradients on one rank."""
    inputs_by_rank = [inputs(CHOICES[name], rank) for rank in range(RANKS)]
    module = experts_of().to_empty(device="cpu")
    for key, parameter in module.named_parameters():
        parameter.data.copy_(make_random_weight(key))
    joined = [torch.cat([tensors[index].detach() for tensors in inputs_by_rank]) for index in range(3)]
    whole = run_experts(module, joined[0].requires_grad_(), joined[1], joined[2].requires_grad_())
    for key, expected in whole.items():
        torch.testing.assert_close(torch.cat([part[key] for part in parts]), expected, rtol=1e-13, atol=1e-14)
