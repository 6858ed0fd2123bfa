"""Inputs for tests of Triton kernels in every layout, and the measure by which results agree."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

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
    Normal numbers in a tensor of this shape, which gets a gradient.

    It is laid out as named: contiguous, with its first and last dimensions exchanged in memory, a slice of wider rows,
    every second element of a wider one, or at an odd offset in its storage.
    """
    numbers = (torch.randn(shape) * scale).to(DEVICE, dtype)
    held = _buffer(layout, numbers)
    held.copy_(numbers)
    return held.requires_grad_()


def _buffer(layout: str, like: Tensor) -> Tensor:
    if layout == "contiguous" or not like.ndim:
        return torch.empty_like(like)
    *most, last = like.shape
    if layout == "transposed":
        return like.new_empty([last, *most[1:], most[0]] if most else [last]).transpose(0, -1)
    if layout == "sliced":
        return like.new_empty(*most, last + 5)[..., 2 : last + 2]
    if layout == "strided":
        return like.new_empty(*most, last, 2)[..., 0]
    return like.new_empty(like.numel() + 1)[1:].view(like.shape)


def spread_apart(x: Tensor, dimension: int) -> Tensor:
    """A copy, with a gradient of its own, whose last element along a dimension is 2^31 elements from the first."""
    gaps = max(1, x.shape[dimension] - 1)
    strides = list(torch.empty_like(x, memory_format=torch.contiguous_format).stride())
    strides[dimension] = -(-(2**31) // gaps)
    held = torch.empty(2**31 + gaps + x.numel(), dtype=x.dtype, device=DEVICE)  # a CPU keeps what is written, no more
    return held.as_strided(x.shape, strides).copy_(x.detach()).requires_grad_(x.requires_grad)


def assert_close(found: Tensor, exact: Tensor, roundings: float = 1.0) -> None:
    """
    The error of the whole tensor is at most so many roundings of its dtype, relative to its size.

    One rounding to nearest is off by at most half an eps, and by 0.3 of one in the root mean square. Tensors whose
    elements are smaller than 1, as the inputs' are, may owe that to cancelling, and count as if they were not.
    """
    assert found.shape == exact.shape
    error, size = (found.double() - exact.double()).norm(), max(exact.double().norm(), exact.numel() ** 0.5)
    assert error <= roundings * torch.finfo(found.dtype).eps * size, float(error / size)


def assert_all_close(found: Sequence[Tensor], exact: Sequence[Tensor], roundings: float = 1.0) -> None:
    """Each of several tensors is close to the exact one of its place, and has the dtype of the input it belongs to."""
    for ours, theirs in zip(found, exact, strict=True):
        assert_close(ours, theirs, roundings)


def exact(*inputs: Tensor) -> Any:
    """A tuple of copies of inputs in float64, which get gradients."""
    return tuple(x.detach().double().contiguous().requires_grad_() for x in inputs)
