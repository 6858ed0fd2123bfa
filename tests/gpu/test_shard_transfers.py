"""What ranks with shards send one another over NCCL: two processes, each on a GPU of its own, or in turns on one."""

import pytest

from support.processes import run_ranks
from support.sharded_sums import Case, alone, assert_same, on_shards

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("pipelines")]

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3071,  # which two ranks do not divide evenly
    "num_hidden_layers": 6,
    "vocab_size": 8192,
}


@pytest.mark.parametrize("precision", [{"parameter": "bfloat16"}, {"compute": "bfloat16"}], ids=["bfloat16", "mixed"])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("small", [2**10, 2**18, 2**40])
def test_shards_compute_what_whole_weights_do(small: int, by_block: bool, precision: dict[str, str]) -> None:
    """
    Logits and gradients of six steps are those of one process to bfloat16, sent in place or packed.

    Memory that is used again before NCCL or a copy is done with it would be another step's, or another weight's.
    """
    case = Case(SIZES, precision, kind="cuda", length=256, steps=6)
    [whole] = run_ranks(alone, 1, case, 2, timeout=180)
    found = run_ranks(on_shards, 2, case, small, by_block, timeout=180)
    assert_same(found, whole, atol=2.0**-5, rtol=2.0**-5)
