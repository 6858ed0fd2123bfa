"""Inferred sharding specs."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.state.sharding import infer_batch_spec, infer_shard_spec
from drawloom.components.state.specs import Replicate, Shard, Stack


@attrs.frozen
class Rows:
    tokens: Any
    name: Any


@pytest.mark.parametrize(
    ("value", "whole", "shard"),
    [
        (torch.ones(2, 3), Shard(), Shard()),
        (torch.ones(()), Replicate(), Stack()),
        ([1, 2], Shard(), Shard()),
        (1.5, Replicate(), Stack()),
        (
            {"loss": torch.ones(()), "rows": Rows(torch.ones(2), "a")},
            {"loss": Replicate(), "rows": Rows(Shard(), Replicate())},
            {"loss": Stack(), "rows": Rows(Shard(), Stack())},
        ),
    ],
)
def test_the_spec_of_each_leaf_is_inferred(value: Any, whole: Any, shard: Any) -> None:
    """Rows are sharded; a number is replicated if it was written as a whole, and stacked if written by shards."""
    assert infer_batch_spec(value) == whole
    assert infer_shard_spec(value) == shard
