"""Bits per byte."""

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.metrics.bits_per_byte import BitsPerByte
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch
from support.metrics import measure, step_of, step_without_loss


@attrs.frozen
class Tokenizer:
    """Three ids of 1, 4 and 0 bytes."""

    def token_byte_counts(self) -> np.ndarray:
        return np.array([1, 4, 0])


def batch(targets: list[int], weights: list[float]) -> TokenBatch:
    """Return one row of targets."""
    row = torch.tensor([targets])
    return TokenBatch(row, row, row, row, torch.tensor([weights]))


def metric() -> BitsPerByte:
    """Return an open metric."""
    tokenizer: Any = Tokenizer()
    bits_per_byte = BitsPerByte(tokenizer=tokenizer)
    bits_per_byte.open()
    return bits_per_byte


def test_bits_over_all_ranks_are_divided_by_bytes_of_targets() -> None:
    """Ignored targets have no bytes, others count by their weights; ranks without the last stage add nothing."""
    first = [batch([1, 0, IGNORE_INDEX], [1.0, 0.5, 0.0]), batch([2, 2, 2], [1.0, 1.0, 1.0])]
    steps = [
        step_of([0.0, 0.0], [1.5, 3.0], {"cross_entropy": [3.0, 1.0]}, batches=first),
        step_without_loss(),
        step_of([0.0], [1.0], {"cross_entropy": [2.0]}, batches=[batch([0], [2.0])]),
    ]
    assert measure(metric(), *steps) == {"bits_per_byte": pytest.approx(6.0 / math.log(2) / (4 + 0.5 + 2))}


def test_targets_without_bytes_have_no_bits_per_byte() -> None:
    """The value is neither infinite nor NaN."""
    step = step_of([0.0], [1.0], {"cross_entropy": [3.0]}, batches=[batch([2], [1.0])])
    assert measure(metric(), step) == {"bits_per_byte": None}
