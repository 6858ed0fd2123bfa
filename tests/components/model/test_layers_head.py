"""The head, as losses use it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawloom.kernels.deferral import Deferral
from support.losses import sample


def squared_distance(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - F.one_hot(targets.clamp(min=0), logits.shape[-1])).square().sum(-1)


def test_mean_logits_equal_the_mean_of_all_logits() -> None:
    """In float64, mean and gradients equal those of all logits; the mean of bfloat16 logits is float32."""
    case = sample()
    actual, expected = case.head().mean_logits(case.hidden), case.logits().mean(-1)
    torch.testing.assert_close(actual, expected)
    inputs = case.hidden, case.weight
    torch.testing.assert_close(
        torch.autograd.grad(actual.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs)
    )
    half = sample(torch.bfloat16)
    assert half.head().mean_logits(half.hidden).dtype == torch.float32


def test_chunks_of_logits_equal_all_logits_at_once() -> None:
    """With any bound on a chunk's bytes, a function of logits has the same results and gradients."""
    case = sample()
    inputs = case.hidden, case.weight
    expected = squared_distance(case.logits().flatten(0, 1), case.batch.targets.flatten()).view(3, 5)
    grads = torch.autograd.grad(expected.sin().sum(), inputs)
    for max_bytes in (1, 100, 2**20):
        head = case.head()
        actual = head.map_logits(squared_distance, case.hidden, case.batch.targets, max_bytes=max_bytes)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.sin().sum(), inputs), grads)
    with torch.no_grad():
        alone = case.head().map_logits(squared_distance, case.hidden, case.batch.targets, max_bytes=1)
    torch.testing.assert_close(alone, expected.detach())


def test_chunks_never_exceed_their_bound() -> None:
    """Except for inputs and gradients, neither pass makes a tensor larger than `max_bytes` of float32."""
    hidden, weight = torch.randn(4, 64, 2, requires_grad=True), torch.randn(1000, 2, requires_grad=True)
    case = sample(torch.float32)
    smaller: Any = case.head()
    head = type(smaller)(weight, 1000, smaller.kernels, smaller.ranks)
    with LargestTensor() as largest:
        actual = head.map_logits(lambda logits: logits.logsumexp(-1), hidden, max_bytes=8 * 1000 * 4)
        torch.autograd.grad(actual.sum(), (hidden, weight))
    assert largest.elements == 8 * 1000


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A watch on the results of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_gradients_of_chunks_can_be_deferred() -> None:
    """
    With deferred weight gradients, as in zero-bubble schedules, gradients are complete once the deferred part is added.
    """
    case = sample()
    inputs = case.hidden, case.weight
    expected = torch.autograd.grad(
        case.head().map_logits(squared_distance, case.hidden, case.batch.targets).sum(), inputs
    )
    deferral = Deferral()
    with deferral:
        actual = case.head().map_logits(squared_distance, case.hidden, case.batch.targets, max_bytes=100)
    with deferral.defer():
        grad_hidden, grad_weight = torch.autograd.grad(actual.sum(), inputs, allow_unused=True)
    for waiting in deferral.take_queued_gradients():
        part: Any = waiting.drain_and_return_remaining_grad()
        grad_weight = part if grad_weight is None else grad_weight + part
    torch.testing.assert_close((grad_hidden, grad_weight), expected)
