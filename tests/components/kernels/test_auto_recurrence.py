"""Recurrent operations whose rows continue in a cache or on other ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.ports.kernels import Kernels
from drawloom.components.ports.model import KeyValueCache
from drawloom.graph.types.port_match import find_mismatches
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.recompute.selective import Selective
from support.exchanges import Exchange, ThreadPart, run_threads
from support.qwen3 import cpu_kernels
from support.recurrences import draw_recurrence, requiring_grad
from support.split_passes import compute_gradients_in_one_pass, compute_gradients_in_two_passes

DOCUMENTS = {
    "one document": [[24]],
    "borders between and inside pieces": [[6, 12, 6], [3, 7, 14]],
    "short documents": [[1, 1, 4, 1, 5, 2, 10]],
    "pieces shorter than the convolution": [[8], [5, 3]],
    "pieces of one token": [[4], [3, 1]],
}


def documents_of(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def compute(mask: Any, x: Tensor, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    kernels = cpu_kernels()
    q, k, v, g, beta = inputs
    mixed = kernels.gated_delta_rule(q, k, v, g, beta, mask), kernels.state_space(q, k, v, g, mask)
    return kernels.causal_conv(x, weight, mask), *mixed


def test_kernels_fit_the_port() -> None:
    """The component implements the port of recurrent operations."""
    assert find_mismatches(AutoKernels, Kernels) == []


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_ranks_that_share_rows_continue_states(lengths: list[list[int]]) -> None:
    """With context parallelism, two ranks together have the results and the gradients of whole rows."""
    documents, kernels = documents_of(lengths), cpu_kernels()
    rows, length = documents.shape
    piece = length // 4
    drawn = draw_recurrence(length, (1, 2), (4, 3), rows)
    x, weight = torch.randn(rows, length, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    learned = requiring_grad(x, weight, *drawn)
    whole = compute(kernels.recurrence_mask(documents), *learned)
    exchange = Exchange(torch.tensor([*range(piece), *range(3 * piece, length)]), torch.arange(piece, 3 * piece))
    split = requiring_grad(x, weight, *drawn)

    def run(rank: int) -> tuple[Tensor, ...]:
        part = ThreadPart(exchange, rank)
        own = [tensor if number == 1 else tensor[:, part.token_indices] for number, tensor in enumerate(split)]
        return compute(kernels.recurrence_mask(documents[:, part.token_indices], part), *own)

    parts = run_threads(run)
    order = torch.cat(exchange.token_indices).argsort()
    joined = [torch.cat(results, 1)[:, order] for results in zip(*parts, strict=True)]
    torch.testing.assert_close(joined, list(whole), rtol=1e-10, atol=1e-10)
    seeds = [torch.randn_like(tensor) for tensor in whole]
    grads = torch.autograd.grad(joined, split, seeds), torch.autograd.grad(whole, learned, seeds)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_a_cache_keeps_states_in_the_order_of_operations() -> None:
    """Two layers with all operations continue their own states, token by token."""
    kernels, cache = cpu_kernels(), KeyValueCache(9)
    drawn, documents = draw_recurrence(9, (1, 2), (4, 3)), torch.zeros(2, 9, dtype=torch.int64)
    x, weight = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    mask = kernels.recurrence_mask(documents)
    whole = [compute(mask, factor * x, weight, *drawn[:2], factor * drawn[2], *drawn[3:]) for factor in (1, 2)]
    for part in (slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 9)):
        mask = kernels.recurrence_mask(documents[:, part], cache=cache)
        q, k, v, g, beta = (tensor[:, part] for tensor in drawn)
        for factor, wanted in zip((1, 2), whole, strict=True):
            actual = compute(mask, factor * x[:, part], weight, q, k, factor * v, g, beta)
            torch.testing.assert_close(list(actual), [tensor[:, part] for tensor in wanted])
        cache.end_pass(part.stop - part.start)
    assert cache.cached_layer_count == 6


class RecurrentLayer(nn.Module):
    """Projections around the operations of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.taps = nn.Parameter(torch.randn(22, 6)), nn.Parameter(torch.randn(18, 4))
        self.out = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Return (rows, length, 6) like x."""
        kernels = cpu_kernels()
        mask = kernels.recurrence_mask(documents_of([[3, 6], [9]]))
        mixed, g, beta = kernels.linear(x, self.project).split([18, 2, 2], -1)  # type: ignore[no-untyped-call]
        mixed = kernels.causal_conv(mixed, self.taps, mask)
        q, k, v = (part.view(2, 9, 2, 3) for part in mixed.chunk(3, -1))
        mixed = kernels.gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), mask)
        return (kernels.linear(mixed.flatten(2), self.out),)


def test_a_recomputed_recurrent_layer_has_the_same_bits() -> None:
    """Selective recomputation and a rerun layer have the results and gradients of a plain run."""
    torch.manual_seed(0)
    layer, x = RecurrentLayer(), torch.randn(2, 9, 6, requires_grad=True)
    learned = [x, *layer.parameters()]
    (plain,) = layer(x)
    expected = torch.autograd.grad(plain.square().sum(), learned)
    with Selective():
        (selective,) = layer(x)
    for again in (selective, call_with_recomputation(layer, x)[0]):
        assert torch.equal(again, plain)
        for grad, wanted in zip(torch.autograd.grad(again.square().sum(), learned), expected, strict=True):
            assert torch.equal(grad, wanted)


def test_a_split_backward_pass_has_the_same_gradients() -> None:
    """A pass for inputs and one for weights together have the gradients of torch's backward pass."""
    torch.manual_seed(0)
    layer, x = RecurrentLayer(), torch.randn(2, 9, 6, requires_grad=True)
    torch.testing.assert_close(compute_gradients_in_two_passes(layer, [x]), compute_gradients_in_one_pass(layer, [x]))
