"""Bitwise equality."""

from typing import Any

import torch
from torch import Tensor


def assert_equal(first: Any, second: Any) -> None:
    """Assert that two trees have bitwise the same tensors, and the same numbers."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_equal(value, second[key])
    elif isinstance(first, Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second)
    else:
        assert first == second
