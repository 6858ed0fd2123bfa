"""What every reduction does."""

import torch

from drawloom.components.ports.distributed import Reduce
from drawloom.graph.testing import expect


def a_total_is_a_sum(reduce: Reduce) -> None:
    """The total keeps shape and float64, is at least what this rank gave, and adds up where that does."""
    given = torch.tensor([1.0, 2.0, 1e-9], dtype=torch.float64)
    total, twice = reduce.total(given.clone()), reduce.total(2 * given)
    expect(total.dtype == torch.float64 and total.shape == given.shape, f"the total is {total.dtype} {total.shape}")
    expect(bool((total >= given).all()) and torch.allclose(twice, 2 * total), "the total is no sum")
