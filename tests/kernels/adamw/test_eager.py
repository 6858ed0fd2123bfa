"""AdamW against torch's AdamW in float32, and its stochastic rounding to bfloat16."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drawloom.kernels.adamw.eager import (
    ALL,
    AdamwEager,
    ParamState,
    compute_step_scalars,
    join_bfloat16_and_remainder,
    split_into_bfloat16_and_remainder,
)


def make_state(
    weight: Tensor, kept: torch.dtype = torch.float32, *, amsgrad: bool = False, **settings: float
) -> ParamState:
    mean, exp_avg_sq, greatest = (torch.zeros_like(weight, dtype=kept) for _ in range(3))
    numbers = settings.get("weight_decay", 0.0), int(settings.get("key", 5))
    return ParamState(weight, mean, exp_avg_sq, *numbers, max_exp_avg_sq=greatest if amsgrad else None)


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
def test_float32_steps_equal_torch_adamw(stochastic: bool, amsgrad: bool, maximize: bool) -> None:
    """In float32, weights and state equal torch's AdamW with a decay per weight, with and without noise."""
    weights = [torch.randn(5, 3), torch.randn(7)]
    ours = [
        make_state(weights[0].clone(), weight_decay=0.3, amsgrad=amsgrad),
        make_state(weights[1].clone(), amsgrad=amsgrad),
    ]
    theirs = [weight.clone().requires_grad_() for weight in weights]
    groups = [{"params": [theirs[0]], "weight_decay": 0.3}, {"params": [theirs[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, amsgrad=amsgrad, maximize=maximize)
    stepper = AdamwEager(ours, maximize)
    for step in range(1, 6):
        gradients = [
            torch.randn_like(weight) / step for weight in weights
        ]  # decreasing, so that AMSGrad's maximum exceeds the average
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        stepper.step(gradients, compute_step_scalars(0.01, (0.8, 0.9), 1e-6, step), step if stochastic else None)
    for our_state, their_weight in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_state.weight, their_weight.detach(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(our_state.exp_avg, optimizer.state[their_weight]["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(
            our_state.exp_avg_sq, optimizer.state[their_weight]["exp_avg_sq"], rtol=1e-5, atol=1e-7
        )
        if our_state.max_exp_avg_sq is not None:
            greatest = optimizer.state[their_weight]["max_exp_avg_sq"]
            torch.testing.assert_close(our_state.max_exp_avg_sq, greatest, rtol=1e-5, atol=1e-7)
            assert (greatest > our_state.exp_avg_sq).any()


def test_scalars_of_many_weights_equal_single_ones() -> None:
    """Step counts per weight give one row of scalars per weight, bitwise equal to single counts."""
    counts = [1, 2, 1000, 2**24 + 1]
    rows = compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, torch.tensor(counts))
    for row, count in zip(rows, counts, strict=True):
        assert torch.equal(row, compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, count))
    expected = [1e-3, 0.1, 0.05, 1e-3 / (1 - 0.9**2), (1 - 0.95**2) ** -0.5, 1e-8]
    torch.testing.assert_close(rows[1], torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_small_steps_add_up(kept: torch.dtype) -> None:
    """Steps far below the spacing of bfloat16 move weights as far on average as they move float32 weights."""
    weight = torch.ones(20_000, dtype=torch.bfloat16)
    one, gradient = make_state(weight, kept), torch.ones(20_000, dtype=torch.bfloat16)
    stepper = AdamwEager([one])
    for step in range(1, 21):
        stepper.step([gradient], compute_step_scalars(1e-4, (0.9, 0.95), 1e-8, step), counter=step)
    # The gradient is constant, so each of 20 steps is by lr, a fortieth of the spacing of bfloat16 below 1.
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=1e-4)
    assert weight.min() < weight.max()


def test_noise_depends_on_key_counter_and_index() -> None:
    """Bits depend on key, counter and index only, and a part of a weight is rounded like within the whole."""

    def step_once(key: int, counter: int, part: slice = slice(None)) -> Tensor:
        weight = torch.linspace(1, 2, 1000).bfloat16()[part].clone()
        mean, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        one = ParamState(weight, mean, exp_avg_sq, 0.1, key, part.start or 0)
        AdamwEager([one]).step([torch.ones_like(weight)], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), counter)
        return weight

    assert torch.equal(step_once(1, 1), step_once(1, 1))
    assert not torch.equal(step_once(1, 1), step_once(2, 1))
    assert not torch.equal(step_once(1, 1), step_once(1, 2))
    assert torch.equal(step_once(1, 1)[300:500], step_once(1, 1, slice(300, 500)))


@pytest.mark.parametrize(
    "part",
    [
        (slice(None), slice(4, 10)),
        (slice(1, 6), slice(3, 10)),
        (slice(2, 5), slice(0, 4)),
        (slice(3, 7), slice(None)),
        (slice(3, 4), slice(5, 8)),
    ],
    ids=["even columns", "odd columns", "columns of an odd width", "rows that begin between two", "a part of a row"],
)
@pytest.mark.parametrize("columns", [11, 12])
def test_a_box_is_rounded_like_within_the_whole(part: tuple[slice, slice], columns: int) -> None:
    """A box of rows and columns has the whole weight's bits, even if it splits a noise draw."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(7, columns, generator=generator) for _ in range(2))

    def step_twice(weight: Tensor, gradient: Tensor, first: int = 0, width: int = ALL, stride: int = 0) -> list[Tensor]:
        kept = weight.bfloat16(), torch.zeros_like(weight).bfloat16(), torch.zeros_like(weight).bfloat16()
        one = ParamState(kept[0], kept[1], kept[2], 0.1, 7, first_index=first, row_width=width, row_stride=stride)
        for step in (1, 2):
            AdamwEager([one]).step([gradient], compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, step), step)
        return [*kept]

    whole = step_twice(weight, gradient)
    rows, across = part[0].indices(7), part[1].indices(columns)
    layout = rows[0] * columns + across[0], across[1] - across[0], columns
    for actual, expected in zip(step_twice(weight[part].clone(), gradient[part], *layout), whole, strict=True):
        assert torch.equal(actual, expected[part])


def test_mixed_state_dtypes_are_refused() -> None:
    """State of two dtypes is an error."""
    weight = torch.ones(4).bfloat16()
    with pytest.raises(ValueError, match="make the moments one dtype"):
        ParamState(weight, weight.clone(), torch.ones(4), 0.0, 1)


def test_strided_weights_equal_contiguous_ones() -> None:
    """A transposed weight changes like its contiguous copy: noise follows the index in the tensor."""
    copy, view = torch.linspace(1, 2, 12).view(3, 4).bfloat16(), torch.empty(4, 3).bfloat16().T
    view.copy_(copy)
    for weight in (copy, view):
        one = ParamState(weight, torch.zeros(3, 4), torch.zeros(3, 4), 0.0, 1)
        AdamwEager([one]).step([torch.ones(3, 4)], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    assert torch.equal(copy, view)


def test_nan_gradient_stays_visible() -> None:
    """A NaN gradient leaves NaN in the weight and its state."""
    one = make_state(torch.ones(4).bfloat16(), torch.bfloat16)
    gradient = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    AdamwEager([one]).step([gradient], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    for tensor in (one.weight, one.exp_avg, one.exp_avg_sq):
        assert tensor.isnan().tolist() == [False, True, False, False]


def test_every_master_is_split_exactly() -> None:
    """All lower halves, ties and negatives included, and all special numbers come back, and NaN stays NaN."""
    low = torch.arange(2**16, dtype=torch.int32)
    specials = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 2.0**-140, 3.4028234e38])
    for high in (0x0000, 0x3F80, 0xBF81, 0x7F7E, 0x0001):
        master = (low | high << 16 if high < 0x8000 else low | high - 2**16 << 16).view(torch.float32)
        for numbers in (master, specials):
            weight, remainder = split_into_bfloat16_and_remainder(numbers)
            assert torch.equal(
                join_bfloat16_and_remainder(weight, remainder).view(torch.int32), numbers.view(torch.int32)
            )
            finite = numbers[numbers.isfinite()].double()
            errors = [(half[numbers.isfinite()].double() - finite).abs() for half in (weight, numbers.bfloat16())]
            assert torch.equal(*errors)  # the nearest, except for the side of a tie
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert split_into_bfloat16_and_remainder(nan)[0].isnan().all()


@pytest.mark.parametrize("noise", [None, 5])
def test_masters_with_remainders_train_like_float32_weights(noise: int | None) -> None:
    """Weights and remainders are float32 weights, bit for bit, whatever rounds the running means."""
    start = torch.randn(1000).bfloat16()
    wide = make_state(start.float(), weight_decay=0.1)
    narrow = replace(make_state(start.clone(), weight_decay=0.1), remainder=torch.zeros(1000, dtype=torch.int16))
    for step in range(1, 6):
        grads, scalars = [torch.randn(1000) * 1e-3], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, step)
        for param in (wide, narrow):
            AdamwEager([param]).step(grads, scalars, noise)
    assert narrow.remainder is not None
    assert torch.equal(join_bfloat16_and_remainder(narrow.weight, narrow.remainder), wide.weight)
    assert not torch.equal(narrow.weight, start)
