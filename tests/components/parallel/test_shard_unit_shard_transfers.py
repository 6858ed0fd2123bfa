"""Messages between ranks with shards."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.float8.layers import Float8Message
from drawloom.components.parallel import shard_unit
from drawloom.components.parallel.shard_unit import choose_gradient_message_dtype, start_sum
from drawloom.kernels.float8.experts import pack_weights
from support.joined import join_processes
from support.processes import run_ranks
from support.sharded_sums import Case, alone, assert_same, on_shards, slice_of

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 25,  # which neither 2 nor 3 ranks divide evenly
    "num_hidden_layers": 2,
    "vocab_size": 21,
}


def _gradients(rank: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """
    Return a rank's gradients in several shapes, sent alone or packed. 256 in bfloat16, whose next number is 258,
    swallows the others' 1.
    """
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(size, generator=generator) for size in ((6, 4), (3, 5), (4, 3), (7,), (9, 2), (1, 4))]
    for gradient in gradients:
        gradient.view(-1)[::3] = 256.0 if rank == 0 else 1.0
    gradients[2] = gradients[2].t()  # (3, 4), not contiguous
    if rank == 1:
        gradients[2] = torch.zeros(3, 4)  # for a weight that was not used
    return [gradient.to(dtype) for gradient in gradients]


def _sum_gradients(small: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a rank's sums, of two exchanges; rank 1 has no gradient for an unused weight."""
    shard_unit.PACKED_BELOW_BYTES = small
    with join_processes() as (processes, _):
        ranks = processes.world_size
        gradients = _gradients(processes.rank, dtype)
        shapes = [gradient.shape for gradient in gradients]
        sent = [None if processes.rank == 1 and not gradient.any() else gradient for gradient in gradients]
        for _ in range(2):
            sums = start_sum(sent, shapes, dtype, torch.device("cpu"), dist.group.WORLD).wait()
        return [*torch.split(sums, [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes])]


@pytest.mark.parametrize("small", [0, 16, 2**20])
def test_sums_are_rounded_once(small: int) -> None:
    """Ranks get their slices' float32 sums over all ranks, rounded to bfloat16, sent alone or packed."""
    all_ranks = [_gradients(rank) for rank in range(3)]
    exact = [torch.stack([part.float() for part in parts]).sum(0).bfloat16() for parts in zip(*all_ranks, strict=True)]
    assert any((tensor == 258.0).any() for tensor in exact)
    for rank, sums in enumerate(run_ranks(_sum_gradients, 3, small, torch.bfloat16)):
        for mine, whole in zip(sums, exact, strict=True):
            expected = slice_of(whole, rank, 3).flatten()
            assert torch.equal(mine[: len(expected)], expected)


@pytest.mark.parametrize("small", [0, 48, 2**20])
def test_wide_gradients_are_summed(small: int) -> None:
    """Ranks get their slices' sums over all ranks, to rounding, reduced alone or packed."""
    exact = [sum(parts) for parts in zip(*(_gradients(rank, torch.float64) for rank in range(3)), strict=True)]
    for rank, sums in enumerate(run_ranks(_sum_gradients, 3, small, torch.float32)):
        for mine, whole in zip(sums, exact, strict=True):
            expected: Any = slice_of(torch.as_tensor(whole), rank, 3).flatten().float()
            torch.testing.assert_close(mine[: len(expected)], expected)


@pytest.mark.parametrize(
    ("small", "by_block", "copied"), [(0, False, False), (200, False, False), (0, True, False), (200, True, True)]
)
@pytest.mark.parametrize(
    ("precision", "close"),
    [({"parameter": "bfloat16"}, 0.0), ({"compute": "bfloat16", "uncast": []}, 1e-6)],
    ids=["bfloat16", "mixed"],
)
def test_shards_compute_like_whole_weights(
    precision: dict[str, Any], close: float, small: int, by_block: bool, copied: bool
) -> None:
    """
    Logits are bitwise equal to one process's, and gradients to the float32 sums over the ranks' rows, rounded once in
    bfloat16. This holds for weights gathered by a program, by a forward, block by block, and from shared memory.
    """
    case = Case(SIZES, precision, steps=2, copied=copied)
    key = str(precision)
    if key not in _wholes:
        [_wholes[key]] = run_ranks(alone, 1, case, 3)
    assert_same(run_ranks(on_shards, 3, case, small, by_block), _wholes[key], atol=close, rtol=close)


_wholes: dict[str, Any] = {}
"""Results of one process by precision."""


WIDE = SIZES | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}


def _message_count(case: Case, by_block: bool) -> tuple[Any, list[int]]:
    """Return the results of a rank's steps, and the bytes of its messages with weights."""
    sizes: list[int] = []

    def counting(*arguments: Any) -> Tensor:
        message = pack_weights(*arguments)
        sizes.append(message.nbytes)
        return message

    with mock.patch.object(Float8Message, "pack_weights", staticmethod(counting)):
        return on_shards(case, 0, by_block), sizes


@pytest.mark.parametrize(("by_block", "copied"), [(False, False), (True, False), (True, True)])
def test_weights_in_float8_halve_messages_and_change_no_result(by_block: bool, copied: bool) -> None:
    """Layers in float8 compute the same logits from weights gathered in float8."""
    case = Case(WIDE, {"parameter": "bfloat16"}, steps=2, float8={"gather": True}, copied=copied)
    [whole] = run_ranks(alone, 1, case, 2)
    results = run_ranks(_message_count, 2, case, by_block)
    assert_same([outputs for outputs, _ in results], whole, atol=2e-2, rtol=2e-2)
    weights = 3 * 32 * 48 + 2 * (32 * 32 + 16 * 32)  # of a block
    for outputs, sizes in results:
        for (unprepared, (prepared, _)), expected in zip(outputs, whole, strict=True):
            rank = next(number for number, (out, _) in enumerate(results) if out is outputs)
            assert torch.equal(unprepared, expected[rank][0]) and torch.equal(prepared, expected[rank][0])
        assert sizes and all(weights / 2 < size < 0.55 * weights + 200 for size in sizes)


def test_partial_sums_are_not_rounded() -> None:
    """Gradients travel in 16 bits if the sum is final; with replicas, and wider gradients, in the wide dtype."""
    pure, mixed = DtypePolicy(parameter="bfloat16"), DtypePolicy(compute="bfloat16")
    assert choose_gradient_message_dtype(pure, replicas=False) == torch.bfloat16
    assert (
        choose_gradient_message_dtype(pure, replicas=True)
        == choose_gradient_message_dtype(mixed, replicas=False)
        == torch.float32
    )
    assert choose_gradient_message_dtype(DtypePolicy(parameter="float64"), replicas=False) == torch.float64
