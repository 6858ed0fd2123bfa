"""Inputs for tests of Triton kernels in every layout, and how closely results must agree."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.documents import RecurrentDocuments
from support import interpreter

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Kernels run compiled on a GPU if there is one, else in Triton's interpreter."""

if DEVICE.type == "cpu":
    interpreter.repair()

few = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
"""The interpreter takes some milliseconds for each program."""

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
layouts = st.sampled_from(("contiguous", "transposed", "sliced", "strided", "offset"))

BOUNDARIES = sorted({2**power + step for power in (0, 31, 32, 62) for step in (-1, 0, 1)} | {2**63 - 1})
"""Numbers around those at which Triton gives a scalar another type, or makes it a constant."""

int64s = st.sampled_from(BOUNDARIES) | st.integers(0, 2**63 - 1)


def draw_tensor(layout: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """
    Return normal numbers in a tensor of this shape, which gets a gradient.

    Its layout is contiguous, with its first and last dimensions exchanged in memory, a slice of wider rows, every
    second element of a wider tensor, or at an odd offset in its storage.
    """
    numbers = (torch.randn(shape) * scale).to(DEVICE, dtype)
    tensor = _buffer(layout, numbers)
    tensor.copy_(numbers)
    return tensor.requires_grad_()


def _buffer(layout: str, like: Tensor) -> Tensor:
    if layout == "contiguous" or not like.ndim:
        return torch.empty_like(like)
    *leading, last = like.shape
    if layout == "transposed":
        return like.new_empty([last, *leading[1:], leading[0]] if leading else [last]).transpose(0, -1)
    if layout == "sliced":
        return like.new_empty(*leading, last + 5)[..., 2 : last + 2]
    if layout == "strided":
        return like.new_empty(*leading, last, 2)[..., 0]
    return like.new_empty(like.numel() + 1)[1:].view(like.shape)


def spread_apart(x: Tensor, dimension: int) -> Tensor:
    """
    Return a copy, with a gradient of its own, whose last element along a dimension is 2^31 elements from the first.
    """
    gaps = max(1, x.shape[dimension] - 1)
    strides = list(torch.empty_like(x, memory_format=torch.contiguous_format).stride())
    strides[dimension] = -(-(2**31) // gaps)
    storage = torch.empty(
        2**31 + gaps + x.numel(), dtype=x.dtype, device=DEVICE
    )  # a CPU keeps what is written, no more
    return storage.as_strided(x.shape, strides).copy_(x.detach()).requires_grad_(x.requires_grad)


def assert_close(result: Tensor, exact: Tensor, roundings: float = 1.0) -> None:
    """
    Assert that the whole tensor's error is at most so many roundings of its dtype, relative to its size.

    One rounding to nearest is off by at most half an eps, and by 0.3 eps in the root mean square. If a tensor is
    smaller than the inputs, its elements below 1 may be small by cancellation, and count as if they were 1.
    """
    assert result.shape == exact.shape
    error, size = (result.double() - exact.double()).norm(), max(exact.double().norm(), exact.numel() ** 0.5)
    assert error <= roundings * torch.finfo(result.dtype).eps * size, float(error / size)


def assert_all_close(results: Sequence[Tensor], exact: Sequence[Tensor], roundings: float = 1.0) -> None:
    """Assert that each tensor has the exact one's shape, and an error of at most so many roundings of its own dtype."""
    for result, exact_result in zip(results, exact, strict=True):
        assert_close(result, exact_result, roundings)


def exact(*inputs: Tensor) -> Any:
    """Return copies of the inputs in float64, which get gradients."""
    return tuple(x.detach().double().contiguous().requires_grad_() for x in inputs)


def compare_rules(
    rule: Callable[..., Any],
    exact_rule: Callable[..., Any],
    inputs: Sequence[Tensor],
    documents: RecurrentDocuments,
    state: Tensor | None,
) -> None:
    """
    Compare a recurrence's results, last states and gradients with another implementation's in float64.

    Products are rounded to the dtype of keys, the second input, several times; results have the dtype of values.
    """
    learned = [*inputs] if state is None else [*inputs, state]
    wide, dtype = exact(*learned), inputs[1].dtype
    actual = rule(*inputs, documents, state)
    expected = exact_rule(*wide[: len(inputs)], documents, None if state is None else wide[-1])
    bound = 4.0 if dtype == torch.bfloat16 else 100.0
    assert [x.dtype for x in actual] == [inputs[2].dtype, torch.float32]
    assert_all_close([x.to(dtype) for x in actual], expected, bound)
    seeds = [torch.randn_like(x) for x in actual]
    grads = torch.autograd.grad(actual, learned, seeds)
    assert [grad.dtype for grad in grads] == [x.dtype for x in learned]
    wanted = torch.autograd.grad(expected, wide, [x.double() for x in seeds])
    assert_all_close([grad.to(dtype) for grad in grads], wanted, bound)
