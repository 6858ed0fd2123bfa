"""Matrix products partitioned over ranks (tensor parallelism); whole models are compared in tests/meshes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.model.layers import Embedding, Linear
from drawloom.components.parallel.tensor_ranks import ALONE, TensorRanks, split_over_ranks
from drawloom.components.ports.slices import TensorSlice
from drawloom.graph import UserError
from support.doubles import SilentRank
from support.processes import run_ranks
from support.qwen3 import cpu_kernels, dense, whole


def _exchange_rows() -> list[dict[str, Any]]:
    """Return this rank's results and gradients after exchanges in a row with 3 tokens."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, tensor=processes.world_size, data_replicate=1)
        mesh.open()
        ranks, factor = TensorRanks(mesh.tensor_group), 1.0 + mesh.world.rank
        records = []
        first = mesh.world.rank == 0
        for given, exchange in (
            (torch.arange(3.0)[None, :, None] * factor, ranks.reduce_scatter_tokens),
            (torch.arange(2.0)[:, None] * factor, lambda x: ranks.gather_tokens(x, (1, 3)) * factor),
            (torch.arange(2.0)[:, None] * factor, lambda x: ranks.gather_tokens_without_grad_sum(x, (1, 3))),
            (torch.arange(2.0) * factor, lambda x: ranks.copy_to_ranks(x) * factor),
            (torch.arange(2.0) * factor, ranks.all_reduce),
            (torch.arange(2.0)[None] * factor, lambda x: ranks.gather_last_dimension(x, 4)),
            (torch.tensor([[7.0, 8.0]] if first else [[9.0]]), lambda x: ranks.gather_last_dimension(x, 3)),
        ):
            given.requires_grad_()
            result = exchange(given)
            result.backward(torch.arange(1.0, 1.0 + result.numel()).view_as(result))  # type: ignore[no-untyped-call]
            assert given.grad is not None
            records.append(
                {
                    "shape": list(result.shape),
                    "values": result.flatten().tolist(),
                    "grad": given.grad.flatten().tolist(),
                }
            )
        return records
    finally:
        processes.close()


def test_exchanges_have_correct_results_and_gradients() -> None:
    """
    Ranks get the results and input gradients: sums where ranks compute different things, parts where the same. The
    third token, and the third word of a vocabulary, are alone on the second, padded rank.
    """
    first, second = run_ranks(_exchange_rows, 2)
    assert [record["shape"] for record in first] == [[2, 1], [1, 3, 1], [1, 3, 1], [2], [2], [1, 4], [1, 3]]
    values = [([0.0, 3.0], [6.0, 0.0]), ([0.0, 1.0, 0.0], [0.0, 2.0, 0.0]), ([0.0, 1.0, 0.0],) * 2]
    values += [([0.0, 1.0], [0.0, 4.0]), ([0.0, 3.0],) * 2, ([0.0, 1.0, 0.0, 2.0],) * 2, ([7.0, 8.0, 9.0],) * 2]
    assert [(a["values"], b["values"]) for a, b in zip(first, second, strict=True)] == values
    grads = [([1.0, 2.0, 1.0],) * 2, ([3.0, 6.0], [9.0, 0.0]), ([1.0, 2.0], [3.0, 0.0])]
    grads += [([3.0, 6.0],) * 2, ([1.0, 2.0],) * 2, ([1.0, 2.0], [3.0, 4.0]), ([1.0, 2.0], [3.0])]
    assert [(a["grad"], b["grad"]) for a, b in zip(first, second, strict=True)] == grads


def test_one_rank_exchanges_nothing() -> None:
    """Alone, each exchange gives its argument, not a copy."""
    x = torch.ones(2, 3)
    same = (ALONE.gather_tokens(x, (2,)), ALONE.gather_tokens_without_grad_sum(x, (2,)), ALONE.reduce_scatter_tokens(x))
    assert all(
        output is x
        for output in (*same, ALONE.copy_to_ranks(x), ALONE.all_reduce(x), ALONE.gather_last_dimension(x, 3))
    )
    assert (
        ALONE.find_local_rows_and_mask(torch.ones(1), 2) == (torch.ones(1), None)
        and ALONE.get_vocabulary_part(2) is None
    )


def test_slices_tile_each_split_parameter_and_norms_are_whole() -> None:
    """The ranks' slices are disjoint and together as large as the parameter; a parameter without an entry is whole."""
    with torch.device("meta"):
        model = dense(num_attention_heads=4, num_key_value_heads=2, intermediate_size=6, vocab_size=11)
        sizes = {name: tuple(part.shape) for name, part in whole(model).named_parameters()}
        splits = []
        for rank in range(2):
            module = whole(model).to("meta")
            splits.append(split_over_ranks(module, TensorRanks(SilentRank(rank, 2))))
            for name, parameter_split in splits[-1].items():
                assert tuple(module.get_parameter(name).shape) == parameter_split.tensor_slice.size, name
    assert {name for name in sizes if name not in splits[0]} == {name for name in sizes if "norm" in name}
    for name, parameter_split in splits[0].items():
        tensor_slice, other = parameter_split.tensor_slice, splits[1][name].tensor_slice
        assert tensor_slice.shape == other.shape == sizes[name] and not tensor_slice.overlap(other)
        assert tensor_slice.numel + other.numel == TensorSlice.whole(sizes[name]).numel


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Linear(4, 12, cpu_kernels(), unit=4), "can't partition 3 heads of 4 channels of weight evenly"),
        (Linear(3, 4, cpu_kernels(), style="rowwise"), "can't partition dimension 1 of size 3 of weight evenly"),
        (Embedding(1, 2, cpu_kernels()), "can't partition dimension 0 of size 1 of weight"),
    ],
)
def test_indivisible_sizes_are_refused(layer: Any, message: str) -> None:
    """The message has the ranks, the size and the name."""
    with pytest.raises(UserError, match=f"mesh.tensor = 2 ranks {message}"):
        split_over_ranks(layer, TensorRanks(SilentRank(0, 2)))


def test_a_bias_of_partial_sums_is_added_once() -> None:
    """Two ranks with a layer's split inputs add the bias once in their sum."""
    torch.manual_seed(0)
    layer, x = Linear(4, 3, cpu_kernels(), True, "rowwise"), torch.randn(5, 4)
    expected, parts = layer(x), list[Tensor]()
    for rank in range(2):
        part = Linear(4, 3, cpu_kernels(), True, "rowwise")
        [weight_split] = split_over_ranks(part, TensorRanks(SilentRank(rank, 2))).values()
        with torch.no_grad():
            part.weight.copy_(layer.weight[weight_split.tensor_slice.index()])
            part.bias.copy_(layer.bias)
        parts.append(part(x[:, 2 * rank : 2 * rank + 2]))
    torch.testing.assert_close(parts[0] + parts[1], expected)
