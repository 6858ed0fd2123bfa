"""AdamW on bfloat16 weights against torch's on float32, step by step and on average."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.stochastic_adamw import StochasticAdamwEager, Trained, numbers_of


def trained(weight: Tensor, kept: torch.dtype = torch.float32, **settings: float) -> Trained:
    mean, square = (torch.zeros_like(weight, dtype=kept) for _ in range(2))
    return Trained(weight, mean, square, settings.get("decay", 0.0), int(settings.get("key", 5)))


def test_float32_is_adamw() -> None:
    """With nothing to round, weights and means are those of torch's AdamW, for each weight's own decay."""
    weights = [torch.randn(5, 3), torch.randn(7)]
    ours = [trained(weights[0].clone(), decay=0.3), trained(weights[1].clone())]
    theirs = [weight.clone().requires_grad_() for weight in weights]
    groups = [{"params": [theirs[0]], "weight_decay": 0.3}, {"params": [theirs[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    stepper = StochasticAdamwEager(ours)
    for step in range(1, 6):
        gradients = [torch.randn_like(weight) for weight in weights]
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        stepper.step(gradients, numbers_of(0.01, (0.8, 0.9), 1e-6, step), counter=step)
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, their.detach(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.mean, optimizer.state[their]["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.square, optimizer.state[their]["exp_avg_sq"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_small_steps_add_up(kept: torch.dtype) -> None:
    """Steps far below half a bfloat16 apart move weights as far on average as they move float32 weights."""
    weight = torch.ones(20_000, dtype=torch.bfloat16)
    one, gradient = trained(weight, kept), torch.ones(20_000, dtype=torch.bfloat16)
    stepper = StochasticAdamwEager([one])
    for step in range(1, 21):
        stepper.step([gradient], numbers_of(1e-4, (0.9, 0.95), 1e-8, step), counter=step)
    # Each step is by the rate, for the gradient is constant: 20 of them, each a fortieth of the distance to the next.
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=1e-4)
    assert weight.min() < weight.max()


def test_noise_is_of_key_counter_and_place() -> None:
    """Same key, counter and place give the same bits; another of either gives others; a part is as in the whole."""

    def after(key: int, counter: int, part: slice = slice(None)) -> Tensor:
        weight = torch.linspace(1, 2, 1000).bfloat16()[part].clone()
        mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
        one = Trained(weight, mean, square, 0.1, key, part.start or 0)
        StochasticAdamwEager([one]).step([torch.ones_like(weight)], numbers_of(1e-3, (0.9, 0.95), 1e-8, 1), counter)
        return weight

    assert torch.equal(after(1, 1), after(1, 1))
    assert not torch.equal(after(1, 1), after(2, 1))
    assert not torch.equal(after(1, 1), after(1, 2))
    assert torch.equal(after(1, 1)[300:500], after(1, 1, slice(300, 500)))


def test_refuses_what_it_cannot_do() -> None:
    """An odd first place would share draws with another part; two dtypes of means are a mistake."""
    weight = torch.ones(4).bfloat16()
    with pytest.raises(ValueError, match="first = 3 is odd"):
        Trained(weight, weight.clone(), weight.clone(), 0.0, 1, 3)
    with pytest.raises(ValueError, match="two dtypes"):
        Trained(weight, weight.clone(), torch.ones(4), 0.0, 1)


def test_strided_weights() -> None:
    """A transposed weight changes as its copy does, elements numbered as they stand in the tensor."""
    copy, view = torch.linspace(1, 2, 12).view(3, 4).bfloat16(), torch.empty(4, 3).bfloat16().T
    view.copy_(copy)
    for weight in (copy, view):
        one = Trained(weight, torch.zeros(3, 4), torch.zeros(3, 4), 0.0, 1)
        StochasticAdamwEager([one]).step([torch.ones(3, 4)], numbers_of(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    assert torch.equal(copy, view)


def test_nan_is_not_hidden() -> None:
    """A NaN gradient leaves NaN in the weight and both means."""
    one = trained(torch.ones(4).bfloat16(), torch.bfloat16)
    gradient = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    StochasticAdamwEager([one]).step([gradient], numbers_of(1e-3, (0.9, 0.95), 1e-8, 1), 1)
    for tensor in (one.weight, one.mean, one.square):
        assert tensor.isnan().tolist() == [False, True, False, False]
