"""Transfers between sharding ranks over NCCL: two processes, on separate GPUs or sharing one."""

import pytest

from support.processes import run_ranks
from support.sharded_sums import Case, alone, assert_same, on_shards

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3071,  # odd, so two ranks get uneven shards
    "num_hidden_layers": 6,
    "vocab_size": 8192,
}


@pytest.mark.parametrize("precision", [{"parameter": "bfloat16"}, {"compute": "bfloat16"}], ids=["bfloat16", "mixed"])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize(("small", "copied"), [(2**10, False), (2**18, False), (2**40, False), (2**18, True)])
def test_shards_match_whole_weights(small: int, copied: bool, by_block: bool, precision: dict[str, str]) -> None:
    """
    Logits and gradients of six steps match one process to bfloat16; weights are sent in place, packed or copied.

    If memory were reused before NCCL or a copy has finished, another step's or weight's numbers would appear.
    """
    case = Case(SIZES, precision, kind="cuda", length=256, steps=6, copied=copied)
    [whole] = run_ranks(alone, 1, case, 2, timeout=180)
    sharded = run_ranks(on_shards, 2, case, small, by_block, timeout=180)
    assert_same(sharded, whole, atol=2.0**-5, rtol=2.0**-5)
