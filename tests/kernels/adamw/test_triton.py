"""AdamW in Triton against the eager implementation, bit by bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.adamw.eager import (
    ZERO_CODE,
    AdamwEager,
    ParamState,
    compute_scales_shape,
    compute_step_scalars,
    compute_values_and_midpoints,
)
from drawloom.kernels.adamw.triton import PART, AdamwTriton
from support.kernels import BOUNDARIES, DEVICE, few
from support.seeding import seeds

WIDE, NARROW = torch.float32, torch.bfloat16
kinds = st.tuples(st.integers(0, 1500), st.sampled_from([WIDE, NARROW]), st.sampled_from([WIDE, NARROW]))


def twins(
    shapes: list[tuple[Any, torch.dtype, torch.dtype]], amsgrad: bool = False
) -> tuple[list[ParamState], list[ParamState]]:
    """Return two equal lists of weights with their optimizer state."""

    def make_states() -> list[ParamState]:
        torch.manual_seed(1)
        weights = [torch.randn(shape).to(DEVICE, dtype) for shape, dtype, _ in shapes]
        kept = [[torch.rand(shape).to(DEVICE, state_dtype) for _ in "msg"] for shape, _, state_dtype in shapes]
        return [
            ParamState(
                *(weight, mean, square, 0.1 * (index % 2), 2**60 + index, 2 * index),
                max_exp_avg_sq=greatest if amsgrad else None,
            )
            for index, (weight, (mean, square, greatest)) in enumerate(zip(weights, kept, strict=True))
        ]

    return make_states(), make_states()


def assert_same_bits(ours: list[ParamState], theirs: list[ParamState]) -> None:
    for our_state, their_state in zip(ours, theirs, strict=True):
        assert len(our_state.weight_and_state_tensors) == len(their_state.weight_and_state_tensors)
        for number, pair in enumerate(
            zip(our_state.weight_and_state_tensors, their_state.weight_and_state_tensors, strict=True)
        ):
            assert torch.equal(*pair), number


def step_both(
    ours: list[ParamState],
    theirs: list[ParamState],
    gradients: list[list[Tensor]],
    noise: int | None = 2**40,
    maximize: bool = False,
) -> None:
    triton, eager = AdamwTriton(ours, maximize), AdamwEager(theirs, maximize)
    for step, step_gradients in enumerate(gradients, 1):
        numbers = compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, step)
        counter = None if noise is None else step + noise
        triton.step(step_gradients, numbers, counter)
        eager.step(step_gradients, numbers, counter)


@few
@given(
    seeds,
    st.lists(kinds, min_size=1, max_size=4),
    st.sampled_from([WIDE, NARROW]),
    st.sampled_from([2**40, None]),
    st.booleans(),
    st.booleans(),
)
def test_triton_has_the_bits_of_eager(
    _seed: object,
    shapes: list[tuple[int, torch.dtype, torch.dtype]],
    of_gradients: torch.dtype,
    noise: int | None,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """
    For all sizes and dtypes of weights and both dtypes of gradients, updates equal the eager step's: with noise or
    rounded to nearest, and as AMSGrad; downwards and upwards.
    """
    ours, theirs = twins(shapes, amsgrad)
    gradients = [[torch.randn(t.weight.shape).to(DEVICE, of_gradients) for t in ours] for _ in range(2)]
    step_both(ours, theirs, gradients, noise, maximize)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("number", BOUNDARIES)
def test_scalars_at_boundaries_have_the_same_bits(number: int) -> None:
    """Steps with keys, counters and first indices around 2^32 and 2^63 are bitwise equal to the eager step."""
    for key, counter, first in ((number, 3, 0), (3, number, 0), (3, 3, number // 4 * 2)):
        ours, theirs = twins([((700,), NARROW, NARROW)])
        ours, theirs = ([replace(states[0], key=key, first_index=first)] for states in (ours, theirs))
        gradients, numbers = [torch.randn(700).to(DEVICE)], compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, 1)
        AdamwTriton(ours).step(gradients, numbers, counter)
        AdamwEager(theirs).step(gradients, numbers, counter)
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_device_can_skip_a_step(found_inf: float) -> None:
    """A flag on the device skips the step, and gradients that are not finite then change nothing."""
    ours, theirs = twins([((700,), NARROW, NARROW), ((3, 5), WIDE, WIDE)])
    before, _ = twins([((700,), NARROW, NARROW), ((3, 5), WIDE, WIDE)])
    gradients = [torch.full(t.weight.shape, torch.inf if found_inf else 0.1).to(DEVICE) for t in ours]
    numbers, flag = compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), torch.tensor(found_inf).to(DEVICE)
    AdamwTriton(ours).step(gradients, numbers, 1, flag)
    AdamwEager(theirs).step(gradients, numbers, 1, flag)
    assert_same_bits(ours, theirs)
    assert all(torch.equal(a.weight, b.weight) == bool(found_inf) for a, b in zip(ours, before, strict=True))


def test_a_weight_of_several_programs_equals_eager() -> None:
    """A weight divided among several programs, the last part incomplete, changes like in the eager step."""
    ours, theirs = twins([((2, PART // 2 + 700), NARROW, NARROW), ((3,), NARROW, NARROW)])
    step_both(ours, theirs, [[torch.randn(t.weight.shape).to(DEVICE) for t in ours]])
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("layout", [(3,), (2**33, 24, 60), (2**33 + 1, 24, 60), (4, 25, 60), (4, 24, 61)])
def test_parts_of_a_parameter_equal_eager(layout: tuple[int, ...]) -> None:
    """Rows with any width and stride, also behind 2^33 elements, have the eager step's noise."""
    ours, theirs = twins([((700,), NARROW, NARROW), ((30, 25), NARROW, WIDE)])
    ours, theirs = ([ParamState(*_fields(state), *layout) for state in states] for states in (ours, theirs))
    step_both(ours, theirs, [[torch.randn(t.weight.shape).to(DEVICE) for t in ours] for _ in "12"])
    assert_same_bits(ours, theirs)


def _fields(state: ParamState) -> tuple[Any, ...]:
    return state.weight, state.exp_avg, state.exp_avg_sq, state.weight_decay, state.key


@pytest.mark.parametrize("noise", [2**40, None])
def test_scalar_weights_equal_eager(noise: int | None) -> None:
    """A scalar weight, also as the first of its kind, changes like in the eager steps."""
    ours, theirs = twins([((), WIDE, WIDE), ((5,), WIDE, WIDE), ((), NARROW, NARROW)])
    step_both(ours, theirs, [[torch.randn(t.weight.shape).to(DEVICE) for t in ours] for _ in "12"], noise)
    assert_same_bits(ours, theirs)


def test_each_weight_has_its_own_scalars() -> None:
    """Every weight uses its own row of scalars, also in shared launches and beside empty weights."""
    shapes = [((40,), NARROW, NARROW), ((0,), WIDE, WIDE), ((3, 5), WIDE, WIDE), ((700,), NARROW, NARROW)]
    ours, theirs = twins(shapes)
    gradients = [torch.randn(t.weight.shape).to(DEVICE) for t in ours]
    numbers = compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, torch.tensor([1, 2, 3, 400], device=DEVICE))
    AdamwTriton(ours).step(gradients, numbers)
    AdamwEager(theirs).step(gradients, numbers)
    assert_same_bits(ours, theirs)


def test_gradients_of_any_kind_equal_eager() -> None:
    """Gradients may be strided, unaligned, of mixed dtypes, and new tensors in every step."""
    ours, theirs = twins([((8, 6), NARROW, NARROW), ((5,), NARROW, NARROW)])
    strided, odd = torch.randn(6, 8, device=DEVICE).T.bfloat16(), torch.randn(6, device=DEVICE)[1:]
    step_both(ours, theirs, [[strided, odd], [strided.clone(), odd.clone()]])
    assert_same_bits(ours, theirs)


def test_unaligned_weights_equal_eager() -> None:
    """Weights without alignment for vectorized loads change like in the eager step."""
    ours, theirs = twins([((40,), NARROW, NARROW), ((40,), NARROW, NARROW)])
    moved = torch.empty(41, dtype=NARROW, device=DEVICE)[1:].copy_(ours[0].weight)
    ours[0] = ParamState(
        moved, ours[0].exp_avg, ours[0].exp_avg_sq, ours[0].weight_decay, ours[0].key, ours[0].first_index
    )
    step_both(ours, theirs, [[torch.randn(40, device=DEVICE) for _ in range(2)]])
    assert_same_bits(ours, theirs)


def test_weights_of_a_kind_share_a_launch() -> None:
    """Weights of the same dtypes share a launch, whatever their number and sizes."""
    ours, _ = twins([((size,), NARROW, NARROW) for size in range(1, 20)])
    assert len(AdamwTriton(ours)._launches) == 1


def test_strided_weights_are_refused() -> None:
    """A strided weight is an error, and the message names the eager implementation."""
    weight = torch.ones(3, 4, device=DEVICE).T
    with pytest.raises(ValueError, match="must be contiguous"):
        AdamwTriton([ParamState(weight, torch.zeros_like(weight), torch.zeros_like(weight), 0.0, 1)])


@pytest.mark.parametrize("size", [7, 512, PART + 40])
def test_master_weights_equal_eager_ones(size: int) -> None:
    """Weights and remainders have the eager bits, with amsgrad and NaN, too."""
    ours, theirs = twins([(size, NARROW, NARROW)], amsgrad=True)
    for params in (ours, theirs):
        params[0] = replace(params[0], remainder=torch.arange(size, dtype=torch.int16, device=DEVICE) * 77)
    grads = [[torch.randn(size, device=DEVICE)] for _ in range(3)]
    grads[2][0][0] = torch.nan
    step_both(ours, theirs, grads)
    for our_tensor, their_tensor in zip(
        ours[0].weight_and_state_tensors, theirs[0].weight_and_state_tensors, strict=True
    ):
        same = our_tensor.view(torch.int16) == their_tensor.view(torch.int16)
        assert bool((same | (our_tensor != our_tensor)).all())
    assert bool(ours[0].weight[0].isnan())


@pytest.mark.filterwarnings()  # of the largest numbers' squares
@pytest.mark.parametrize("signed", [True, False])
def test_codes_beside_midpoints_are_the_nearest(signed: bool) -> None:
    """Means a few roundings beside every midpoint between codes get the eager codes, at any size of the block."""
    _, midpoints = compute_values_and_midpoints(signed, torch.device("cpu"))
    beside = midpoints if signed else midpoints.sqrt()  # the mean of squares is then at a midpoint
    steps = torch.tensor([-3, -1, 0, 1, 2], dtype=torch.int32)[:, None]
    beside = (beside.view(torch.int32) + steps).view(torch.float32)
    rows = torch.cat([torch.ones(len(beside), 1), beside], 1)
    gradient = torch.cat([factor * rows for factor in (1.0, -3e-5, 1.5e19, 1e-37)]).to(DEVICE)

    def make_state() -> ParamState:
        codes = [torch.full_like(gradient, code, dtype=torch.uint8) for code in (ZERO_CODE, 0)]
        scales = [torch.zeros(compute_scales_shape(tuple(gradient.shape)), device=DEVICE) for _ in codes]
        zeros = torch.zeros_like(gradient)
        return ParamState(zeros, codes[0], codes[1], 0.1, exp_avg_scale=scales[0], exp_avg_sq_scale=scales[1])

    ours, theirs = make_state(), make_state()
    scalars = compute_step_scalars(1e-3, (0.0, 0.0), 1e-8, 1)
    AdamwTriton([ours]).step([gradient], scalars)
    AdamwEager([theirs]).step([gradient], scalars)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize(("shape", "steps"), [((3, 300), 3), ((70, 256), 1), ((2, 5, 17), 3)])
@pytest.mark.parametrize(("master", "rows"), [(False, True), (True, False)])
def test_means_of_8_bits_equal_eager_ones(shape: tuple[int, ...], steps: int, master: bool, rows: bool) -> None:
    """
    Weights, codes and scales have the eager bits for any row width, whichever part of a parameter the weight is. The
    first codes are random, so one step is enough for a weight of several programs.
    """

    def make_states() -> list[ParamState]:
        torch.manual_seed(2)
        weight = torch.randn(shape).to(DEVICE, NARROW)
        scales = [torch.rand(compute_scales_shape(shape), device=DEVICE) for _ in "ms"]
        mean, square = (torch.randint(256, shape, dtype=torch.uint8).to(DEVICE) for _ in "ms")
        noise = (2**60, 5, shape[-1], 2 * shape[-1]) if rows else (2**60, 6)
        return [
            ParamState(
                *(weight, mean, square, 0.1, *noise),
                remainder=torch.zeros(shape, dtype=torch.int16, device=DEVICE) if master else None,
                exp_avg_scale=scales[0],
                exp_avg_sq_scale=scales[1],
            )
        ]

    ours, theirs = make_states(), make_states()
    # Sizes in all decades of the map, and below.
    grads = [[torch.randn(shape, device=DEVICE) * 10 ** (-9 * torch.rand(shape, device=DEVICE))] for _ in range(steps)]
    step_both(ours, theirs, grads)
    assert_same_bits(ours, theirs)
