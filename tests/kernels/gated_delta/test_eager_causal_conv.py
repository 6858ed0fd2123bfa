"""The causal convolution against a loop over tokens, and torch's convolution."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.gated_delta.eager import causal_conv_eager
from support.seeding import seeds


def by_token(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Compute each token's sum over exactly the tokens in its document."""
    result = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for token in range(x.shape[1]):
            for lag in range(min(weight.shape[1], token + 1)):
                if ids[row, token - lag] == ids[row, token]:
                    result[row, token] += weight[:, -1 - lag] * x[row, token - lag]
    return result * result.sigmoid()


@settings(max_examples=20)
@given(seeds, st.integers(0, 2), st.integers(1, 9), st.integers(1, 5))
def test_tokens_see_their_document(_seed: object, rows: int, length: int, taps: int) -> None:
    """For any documents and number of taps, the result equals a loop over tokens."""
    x, weight = torch.randn(rows, length, 3, dtype=torch.float64), torch.randn(3, taps, dtype=torch.float64)
    ids = torch.randint(2, (rows, length)).cumsum(1)
    torch.testing.assert_close(causal_conv_eager(x, weight, ids), by_token(x, weight, ids))


def test_one_document_equals_the_convolution_of_torch() -> None:
    """For one document the result is torch's convolution over padded tokens, and SiLU."""
    x, weight = torch.randn(2, 9, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=6)).mT
    torch.testing.assert_close(causal_conv_eager(x, weight, torch.zeros(2, 9, dtype=torch.int32)), expected)


def test_gradients_match_finite_differences() -> None:
    """Gradients with respect to x and the weight equal finite differences, with several documents."""
    x = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0, 0, 1, 2, 2], [0] * 6])
    assert torch.autograd.gradcheck(lambda x, weight: causal_conv_eager(x, weight, ids), (x, weight))


@pytest.mark.parametrize("length", [0, 1])
def test_rows_may_be_shorter_than_the_taps(length: int) -> None:
    """No token, and a single one, have the shape of their input."""
    x = torch.randn(2, length, 3)
    assert causal_conv_eager(x, torch.randn(3, 4), torch.zeros(2, length, dtype=torch.int32)).shape == x.shape
