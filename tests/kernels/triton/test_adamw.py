"""AdamW in Triton is bitwise equal to the eager implementation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.adamw import AdamwEager, ParamState, step_scalars
from drawloom.kernels.triton.adamw import PART, AdamwTriton
from support.kernels import BOUNDARIES, DEVICE, few
from support.seeding import seeds

WIDE, NARROW = torch.float32, torch.bfloat16
kinds = st.tuples(st.integers(0, 1500), st.sampled_from([WIDE, NARROW]), st.sampled_from([WIDE, NARROW]))


def twins(shapes: list[tuple[Any, torch.dtype, torch.dtype]]) -> tuple[list[ParamState], list[ParamState]]:
    """Return two equal lists of weights with their optimizer state."""

    def random_params() -> list[ParamState]:
        torch.manual_seed(1)
        weights = [torch.randn(shape).to(DEVICE, dtype) for shape, dtype, _ in shapes]
        kept = [[torch.rand(shape).to(DEVICE, of_kept) for _ in "ms"] for shape, _, of_kept in shapes]
        return [
            ParamState(weight, mean, square, 0.1 * (index % 2), 2**60 + index, 2 * index)
            for index, (weight, (mean, square)) in enumerate(zip(weights, kept, strict=True))
        ]

    return random_params(), random_params()


def assert_same_bits(params: list[ParamState], expected: list[ParamState]) -> None:
    for param, twin in zip(params, expected, strict=True):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(param, name), getattr(twin, name)), name


def step_both(
    params: list[ParamState],
    expected: list[ParamState],
    gradients: list[list[Tensor]],
    noise: int | None = 2**40,
) -> None:
    triton, eager = AdamwTriton(params), AdamwEager(expected)
    for step, step_gradients in enumerate(gradients, 1):
        numbers = step_scalars(1e-2, (0.9, 0.95), 1e-8, step)
        counter = None if noise is None else step + noise
        triton.step(step_gradients, numbers, counter)
        eager.step(step_gradients, numbers, counter)


@few
@given(seeds, st.lists(kinds, min_size=1, max_size=4), st.sampled_from([WIDE, NARROW]), st.sampled_from([2**40, None]))
def test_triton_has_the_bits_of_eager(
    _seed: object, shapes: list[tuple[int, torch.dtype, torch.dtype]], of_gradients: torch.dtype, noise: int | None
) -> None:
    """
    Weights of all sizes and dtypes, with gradients of either dtype, get the bits of the eager step, with or without
    noise.
    """
    params, expected = twins(shapes)
    gradients = [[torch.randn(t.weight.shape).to(DEVICE, of_gradients) for t in params] for _ in range(2)]
    step_both(params, expected, gradients, noise)
    assert_same_bits(params, expected)


@pytest.mark.parametrize("number", BOUNDARIES)
def test_scalars_at_boundaries_have_the_same_bits(number: int) -> None:
    """Keys, counters and first indices around 2^32 and 2^63 give the bits of the eager step."""
    for key, counter, first in ((number, 3, 0), (3, number, 0), (3, 3, number // 4 * 2)):
        params, expected = twins([((700,), NARROW, NARROW)])
        params, expected = ([replace(group[0], key=key, first=first)] for group in (params, expected))
        gradients, numbers = [torch.randn(700).to(DEVICE)], step_scalars(1e-2, (0.9, 0.95), 1e-8, 1)
        AdamwTriton(params).step(gradients, numbers, counter)
        AdamwEager(expected).step(gradients, numbers, counter)
        assert_same_bits(params, expected)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_device_can_skip_a_step(found_inf: float) -> None:
    """A number on the device can skip the step; gradients that are not finite then change nothing."""
    params, expected = twins([((700,), NARROW, NARROW), ((3, 5), WIDE, WIDE)])
    before, _ = twins([((700,), NARROW, NARROW), ((3, 5), WIDE, WIDE)])
    gradients = [torch.full(t.weight.shape, torch.inf if found_inf else 0.1).to(DEVICE) for t in params]
    numbers, flag = step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), torch.tensor(found_inf).to(DEVICE)
    AdamwTriton(params).step(gradients, numbers, 1, flag)
    AdamwEager(expected).step(gradients, numbers, 1, flag)
    assert_same_bits(params, expected)
    assert all(torch.equal(a.weight, b.weight) == bool(found_inf) for a, b in zip(params, before, strict=True))


def test_several_programs_update_a_weight() -> None:
    """A weight that several programs update, the last one only in part, changes as by the eager step."""
    params, expected = twins([((2, PART // 2 + 700), NARROW, NARROW), ((3,), NARROW, NARROW)])
    step_both(params, expected, [[torch.randn(t.weight.shape).to(DEVICE) for t in params]])
    assert_same_bits(params, expected)


@pytest.mark.parametrize("box", [(3,), (2**33, 24, 60), (2**33 + 1, 24, 60), (4, 25, 60), (4, 24, 61)])
def test_parts_of_a_parameter_have_the_same_bits(box: tuple[int, ...]) -> None:
    """Rows of any width and distance, also beyond 2^33 elements, get the noise of the eager step."""
    params, expected = twins([((700,), NARROW, NARROW), ((30, 25), NARROW, WIDE)])
    params, expected = ([ParamState(*_fields(param), *box) for param in group] for group in (params, expected))
    step_both(params, expected, [[torch.randn(t.weight.shape).to(DEVICE) for t in params] for _ in "12"])
    assert_same_bits(params, expected)


def _fields(param: ParamState) -> tuple[Any, ...]:
    return param.weight, param.exp_avg, param.exp_avg_sq, param.weight_decay, param.key


@pytest.mark.parametrize("noise", [2**40, None])
def test_weights_without_dimensions_are_updated(noise: int | None) -> None:
    """A weight without dimensions, also the first one of its kind, changes as by two eager steps."""
    params, expected = twins([((), WIDE, WIDE), ((5,), WIDE, WIDE), ((), NARROW, NARROW)])
    step_both(
        params,
        expected,
        [[torch.randn(t.weight.shape).to(DEVICE) for t in params] for _ in "12"],
        noise,
    )
    assert_same_bits(params, expected)


def test_each_weight_has_its_own_scalars() -> None:
    """Each weight uses its own row of scalars, whichever launch it shares, also beside empty weights."""
    shapes = [((40,), NARROW, NARROW), ((0,), WIDE, WIDE), ((3, 5), WIDE, WIDE), ((700,), NARROW, NARROW)]
    params, expected = twins(shapes)
    gradients = [torch.randn(t.weight.shape).to(DEVICE) for t in params]
    numbers = step_scalars(1e-2, (0.9, 0.95), 1e-8, torch.tensor([1, 2, 3, 400], device=DEVICE))
    AdamwTriton(params).step(gradients, numbers)
    AdamwEager(expected).step(gradients, numbers)
    assert_same_bits(params, expected)


def test_gradients_of_any_kind_are_accepted() -> None:
    """Gradients that are strided, unaligned, of mixed dtypes and new in each step give the eager step."""
    params, expected = twins([((8, 6), NARROW, NARROW), ((5,), NARROW, NARROW)])
    strided, odd = torch.randn(6, 8, device=DEVICE).T.bfloat16(), torch.randn(6, device=DEVICE)[1:]
    step_both(params, expected, [[strided, odd], [strided.clone(), odd.clone()]])
    assert_same_bits(params, expected)


def test_unaligned_weights_are_updated() -> None:
    """Weights that are not aligned for vectorized loads change as by the eager step."""
    params, expected = twins([((40,), NARROW, NARROW), ((40,), NARROW, NARROW)])
    moved = torch.empty(41, dtype=NARROW, device=DEVICE)[1:].copy_(params[0].weight)
    params[0] = replace(params[0], weight=moved)
    step_both(params, expected, [[torch.randn(40, device=DEVICE) for _ in range(2)]])
    assert_same_bits(params, expected)


def test_weights_of_a_kind_share_a_launch() -> None:
    """Weights of the same dtypes share a launch, whatever their number and sizes."""
    params, _ = twins([((size,), NARROW, NARROW) for size in range(1, 20)])
    assert len(AdamwTriton(params)._launches) == 1


def test_strided_weights_are_refused() -> None:
    """A weight that is not contiguous is an error that names the eager implementation."""
    weight = torch.ones(3, 4, device=DEVICE).T
    with pytest.raises(ValueError, match="must be contiguous"):
        AdamwTriton([ParamState(weight, torch.zeros_like(weight), torch.zeros_like(weight), 0.0, 1)])
