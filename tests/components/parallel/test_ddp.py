"""Gradients summed over replicas while the last backward pass computes others; whole steps are in tests/meshes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.ddp import ReplicatedStore
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.components.ports.distributed import Pending


class Twins(SingleProcess):
    """Two equal replicas and their sums: the gradients known by then, by tensor size."""

    size = 2

    def __init__(self) -> None:
        self.module: Any = None
        self.calls: list[tuple[int, list[str]]] = []

    def start_sum(self, tensor: Tensor) -> Pending:
        known = [name for name, parameter in self.module.named_parameters() if parameter.grad is not None]
        self.calls.append((tensor.numel(), known))
        tensor.mul_(2)
        return super().start_sum(tensor)


class Stack(nn.Module):
    """Three layers, the blocks, before an output; `unused` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2, bias=False)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.last = nn.Linear(2, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def store_of(module: Any, group: Twins, bucket_bytes: int, **precision: Any) -> ReplicatedStore:
    """Return the module's parameters in a store, with its layers as blocks."""
    group.module = module
    how = DtypePolicy(**precision), group, bucket_bytes
    return ReplicatedStore.from_replicated_modules([module], lambda _: [*module.layers], *how)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_the_sum_of_equal_replicas_is_twice_the_gradient(bucket_bytes: int) -> None:
    """Every gradient is summed once, for any buckets and microbatches; unused weights contribute zeros."""
    module, plain, group = Stack(), Stack(), Twins()
    store = store_of(module, group, bucket_bytes)
    rows = torch.randn(2, 4, 2)
    for number, x in enumerate(rows):
        if number == 1:
            store.modules[module].reduce_in_next_backward(is_last_in_step=True)
        module(x).sum().backward()
        plain(x).sum().backward()
    store.after_backward()
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        expected = torch.zeros(3) if name == "unused" else 2 * other.grad  # type: ignore[operator]
        torch.testing.assert_close(parameter.grad, expected)
    assert sum(size for size, _ in group.calls) == sum(parameter.numel() for parameter in module.parameters())
    assert store.parameters_summed_in_backward == {name for name, _ in module.named_parameters()}


def test_blocks_are_sent_while_others_are_computed() -> None:
    """When the last block is sent, no gradient of a block before it is known yet; the rest follows in the end."""
    module, group = Stack(), Twins()
    store = store_of(module, group, 1)
    store.modules[module].reduce_in_next_backward(is_last_in_step=True)
    module(torch.randn(4, 2)).sum().backward()
    assert [known for _, known in group.calls] == [
        ["layers.2.weight", "last.weight"],
        ["layers.1.weight", "layers.2.weight", "last.weight"],
        ["layers.0.weight", "layers.1.weight", "layers.2.weight", "last.weight"],
    ]
    store.after_backward()
    assert [size for size, _ in group.calls[3:]] == [3, 4, 2]


def test_blocks_are_sent_while_a_pass_for_the_weights_computes_others() -> None:
    """In W a block is sent once its gradients are known, last block first, before earlier blocks' are known."""
    module, group = Stack(), Twins()
    shards = store_of(module, group, 1).modules[module]
    split, x = SplitBackward(), torch.randn(4, 2)
    with split.forward_context():
        output = module(x)
    split.backward_input([output], [torch.ones_like(output)], [x])
    shards.reduce_in_next_backward(is_last_in_step=True)
    split.backward_weight(shards.list_reduction_units())
    assert [known for _, known in group.calls] == [
        ["layers.2.weight"],
        ["layers.1.weight", "layers.2.weight"],
        ["layers.0.weight", "layers.1.weight", "layers.2.weight"],
    ]
    shards.finish_reduction()
    assert [size for size, _ in group.calls[3:]] == [3, 4, 2]


def test_a_weight_shared_by_blocks_is_sent_once_it_is_whole() -> None:
    """A weight shared by layers, or by a layer and the first module, is reduced once its gradient is complete."""
    module, plain, group = Stack(), Stack(), Twins()
    for model in (module, plain):
        model.layers[2] = model.layers[0]
        model.layers[1].weight = model.first.weight
    store, x = store_of(module, group, 1), torch.randn(4, 2)
    store.modules[module].reduce_in_next_backward(is_last_in_step=True)
    module(x).sum().backward()
    plain(x).sum().backward()
    store.after_backward()
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, 2 * other.grad)


def test_copies_are_summed_in_the_wider_dtype() -> None:
    """With narrow compute copies, sums are in `reduce`, and become the gradients of the masters."""
    module, group = Stack(), Twins()
    store = store_of(module, group, 2**20, parameter="float32", compute="bfloat16")
    store.modules[module].reduce_in_next_backward(is_last_in_step=True)
    module(torch.randn(4, 2).bfloat16()).sum().backward()
    store.after_backward()
    assert all(master.grad is not None and master.grad.dtype == torch.float32 for master in store.masters.values())
    assert all(parameter.grad is None for parameter in module.parameters())
