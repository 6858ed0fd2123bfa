"""Equality to the bit."""

from typing import Any

import torch
from torch import Tensor


def assert_equal(one: Any, other: Any) -> None:
    """Trees with the same tensors, to the bit, and the same numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other
