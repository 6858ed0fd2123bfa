"""AdamW against torch's on float32, step by step and, rounded stochastically to bfloat16, on average."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.adamw import ALL, AdamwEager, ParamState, step_scalars


def trained(
    weight: Tensor, kept: torch.dtype = torch.float32, *, amsgrad: bool = False, **settings: float
) -> ParamState:
    mean, exp_avg_sq, greatest = (torch.zeros_like(weight, dtype=kept) for _ in range(3))
    numbers = settings.get("weight_decay", 0.0), int(settings.get("key", 5))
    return ParamState(weight, mean, exp_avg_sq, *numbers, max_exp_avg_sq=greatest if amsgrad else None)


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
def test_float32_is_adamw(stochastic: bool, amsgrad: bool, maximize: bool) -> None:
    """In float32, with noise or without, weights and state are those of torch's AdamW, by each weight's decay."""
    weights = [torch.randn(5, 3), torch.randn(7)]
    ours = [
        trained(weights[0].clone(), weight_decay=0.3, amsgrad=amsgrad),
        trained(weights[1].clone(), amsgrad=amsgrad),
    ]
    theirs = [weight.clone().requires_grad_() for weight in weights]
    groups = [{"params": [theirs[0]], "weight_decay": 0.3}, {"params": [theirs[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, amsgrad=amsgrad, maximize=maximize)
    stepper = AdamwEager(ours, maximize)
    for step in range(1, 6):
        gradients = [torch.randn_like(weight) / step for weight in weights]  # smaller, so that a maximum stays
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        stepper.step(gradients, step_scalars(0.01, (0.8, 0.9), 1e-6, step), step if stochastic else None)
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, their.detach(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.exp_avg, optimizer.state[their]["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.exp_avg_sq, optimizer.state[their]["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        if mine.max_exp_avg_sq is not None:
            greatest = optimizer.state[their]["max_exp_avg_sq"]
            torch.testing.assert_close(mine.max_exp_avg_sq, greatest, rtol=1e-5, atol=1e-7)
            assert (greatest > mine.exp_avg_sq).any()


def test_scalars_of_weights_are_those_of_each() -> None:
    """A number of steps for each weight gives a row for each, bitwise that of the number alone."""
    counts = [1, 2, 1000, 2**24 + 1]
    rows = step_scalars(1e-3, (0.9, 0.95), 1e-8, torch.tensor(counts))
    for row, count in zip(rows, counts, strict=True):
        assert torch.equal(row, step_scalars(1e-3, (0.9, 0.95), 1e-8, count))
    expected = [1e-3, 0.1, 0.05, 1e-3 / (1 - 0.9**2), (1 - 0.95**2) ** -0.5, 1e-8]
    torch.testing.assert_close(rows[1], torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_small_steps_add_up(kept: torch.dtype) -> None:
    """Steps far below the spacing of bfloat16 move weights as far on average as they move float32 weights."""
    weight = torch.ones(20_000, dtype=torch.bfloat16)
    one, gradient = trained(weight, kept), torch.ones(20_000, dtype=torch.bfloat16)
    stepper = AdamwEager([one])
    for step in range(1, 21):
        stepper.step([gradient], step_scalars(1e-4, (0.9, 0.95), 1e-8, step), counter=step)
    # The gradient is constant, so each of 20 steps is by lr, a fortieth of the spacing of bfloat16 below 1.
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=1e-4)
    assert weight.min() < weight.max()


def test_noise_is_of_key_counter_and_place() -> None:
    """Equal key, counter and index give equal bits, others give others, and a part is rounded as within the whole."""

    def after(key: int, counter: int, part: slice = slice(None)) -> Tensor:
        weight = torch.linspace(1, 2, 1000).bfloat16()[part].clone()
        mean, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        one = ParamState(weight, mean, exp_avg_sq, 0.1, key, part.start or 0)
        AdamwEager([one]).step([torch.ones_like(weight)], step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), counter)
        return weight

    assert torch.equal(after(1, 1), after(1, 1))
    assert not torch.equal(after(1, 1), after(2, 1))
    assert not torch.equal(after(1, 1), after(1, 2))
    assert torch.equal(after(1, 1)[300:500], after(1, 1, slice(300, 500)))


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
def test_a_box_is_rounded_as_within_the_whole(part: tuple[slice, slice], columns: int) -> None:
    """Any rows and columns have the bits of the whole, whether or not elements of one draw are in different parts."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(7, columns, generator=generator) for _ in range(2))

    def after(weight: Tensor, gradient: Tensor, first: int = 0, width: int = ALL, stride: int = 0) -> list[Tensor]:
        kept = weight.bfloat16(), torch.zeros_like(weight).bfloat16(), torch.zeros_like(weight).bfloat16()
        one = ParamState(kept[0], kept[1], kept[2], 0.1, 7, first=first, width=width, stride=stride)
        for step in (1, 2):
            AdamwEager([one]).step([gradient], step_scalars(1e-2, (0.9, 0.95), 1e-8, step), step)
        return [*kept]

    whole = after(weight, gradient)
    rows, across = part[0].indices(7), part[1].indices(columns)
    place = rows[0] * columns + across[0], across[1] - across[0], columns
    for found, expected in zip(after(weight[part].clone(), gradient[part], *place), whole, strict=True):
        assert torch.equal(found, expected[part])


def test_mixed_state_dtypes_are_refused() -> None:
    """State of two dtypes is an error."""
    weight = torch.ones(4).bfloat16()
    with pytest.raises(ValueError, match="make them one dtype"):
        ParamState(weight, weight.clone(), torch.ones(4), 0.0, 1)


def test_strided_weights() -> None:
    """A transposed weight changes as its contiguous copy does: noise follows the index in the tensor, not in memory."""
    copy, view = torch.linspace(1, 2, 12).view(3, 4).bfloat16(), torch.empty(4, 3).bfloat16().T
    view.copy_(copy)
    for weight in (copy, view):
        one = ParamState(weight, torch.zeros(3, 4), torch.zeros(3, 4), 0.0, 1)
        AdamwEager([one]).step([torch.ones(3, 4)], step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    assert torch.equal(copy, view)


def test_nan_gradient_stays_visible() -> None:
    """A NaN gradient leaves NaN in the weight and its state."""
    one = trained(torch.ones(4).bfloat16(), torch.bfloat16)
    gradient = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    AdamwEager([one]).step([gradient], step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    for tensor in (one.weight, one.exp_avg, one.exp_avg_sq):
        assert tensor.isnan().tolist() == [False, True, False, False]
