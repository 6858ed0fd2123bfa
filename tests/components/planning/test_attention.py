"""Attention pairs in rows from documents, beside rows really cut from documents."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from drawloom.components.planning.attention import AttentionFractions, MicrobatchRows, estimate_attention_fractions
from drawloom.components.ports.data import count_visible_keys
from drawloom.components.ports.model import ForwardFlops

LENGTH = 256


def cut_rows(mean: int) -> Tensor:
    """Document ids (rows, LENGTH) of documents of this mean length, one after another."""
    lengths = np.random.default_rng(0).geometric(1 / mean, size=1_000_000 // mean)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy(ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH))


@pytest.mark.parametrize("mean", [20, 200, 2000])
def test_estimated_pairs_match_really_cut_rows(mean: int) -> None:
    """They match with a window and without, and for microbatches with two one-document rows."""
    ids = cut_rows(mean)
    rows = MicrobatchRows(2, LENGTH, mean)
    for window in (None, 16):
        assert rows.count_expected_pairs_per_row(window) == pytest.approx(
            int(count_visible_keys(ids).clamp(max=window or LENGTH).sum()) / len(ids), rel=0.03
        )
    whole = (ids == ids[:, :1]).all(1)[: len(ids) // 2 * 2].view(-1, 2).all(1)
    assert rows.all_rows_one_document_probability == pytest.approx(float(whole.double().mean()), abs=0.03)


def test_rows_of_one_document_have_all_pairs() -> None:
    """The fraction is exact, within a window, too; windows longer than a row don't matter."""
    rows = MicrobatchRows(3, 7)
    assert (
        rows.count_expected_pairs_per_row(),
        rows.count_expected_pairs_per_row(9),
        rows.count_expected_pairs_per_row(2),
        rows.all_rows_one_document_probability,
    ) == (28, 28, 13, 1)
    assert MicrobatchRows(3, 7, document=1).count_expected_pairs_per_row() == 7


def test_layers_with_windows_have_the_kernel_for_packed_rows() -> None:
    """Their pairs count as packed, also in whole rows; other layers' pairs count as packed only in packed rows."""
    rows = MicrobatchRows(1, 8)
    assert estimate_attention_fractions(None, rows, 1.0) == AttentionFractions(36 / 64, 0.0)
    assert estimate_attention_fractions(None, rows, 0.25) == AttentionFractions(36 / 64, 0.75)
    both = estimate_attention_fractions(ForwardFlops({}, {None: 3.0, 2: 1.0}), rows, 1.0)
    assert (both.pairs, both.packed) == pytest.approx(((3 * 36 + 15) / 4 / 64, 15 / (3 * 36 + 15)))
    assert estimate_attention_fractions(ForwardFlops({}, {2: 1.0}), rows, 1.0).packed == 1.0
    assert rows.document == math.inf
