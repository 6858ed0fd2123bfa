"""Experts partitioned over several ranks: tokens get to them and back, in any numbers per rank."""

from typing import Any

import pytest
import torch

from drawloom.components.experts.all_to_all import AllToAllExperts
from drawloom.components.ports.distributed import Mesh
from drawloom.testing import fake
from support.dispatchers import CHOICES, WIDTH, Results, assert_equal_to_one_rank, experts_of, run_on_ranks
from support.qwen3 import cpu_kernels


@pytest.fixture(scope="module")
def by_all_to_all() -> Results:
    """Run all-to-all dispatch on three ranks and return their results."""
    return run_on_ranks(AllToAllExperts)


@pytest.mark.parametrize("name", CHOICES)
def test_results_and_gradients_equal_one_rank(name: str, by_all_to_all: Results) -> None:
    """Hidden states, probabilities and every weight, of experts without tokens too, have one rank's gradients."""
    assert_equal_to_one_rank(name, by_all_to_all[name])


def test_shapes_are_known_without_an_exchange() -> None:
    """On the meta device, where stages learn their message sizes, no rank waits for another."""
    mesh: Any = fake(Mesh, expert_group=type("Group", (), {"size": 2})())
    module = experts_of()
    module.dispatcher = AllToAllExperts(kernels=cpu_kernels(), mesh=mesh)
    hidden, chosen = torch.empty(5, WIDTH, device="meta"), torch.empty(5, 2, dtype=torch.int64, device="meta")
    assert module(hidden.double(), chosen, hidden[:, :2].double()).shape == (5, WIDTH)
