"""AdamW by a Triton kernel beside torch's own."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.optim.adamw_step import AdamWTriton
from drawloom.components.optim.torch_optimizer import create_fastest_adamw
from support.equality import assert_equal
from support.kernels import DEVICE

WIDE, NARROW = torch.float32, torch.bfloat16
SIZES = ((3, 40), (0, 5), (700,), (1,), ())
SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return weights in several shapes, a number, an empty one and one unaligned for vectorized loads."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in SIZES]
    return [*map(nn.Parameter, drawn), nn.Parameter(torch.full((41,), 0.5, dtype=dtype, device=DEVICE)[1:])]


def groups(parts: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups with different values of all settings."""
    return [
        {"params": list(parts[:2]), "weight_decay": 0.5},
        {"params": list(parts[2:]), "weight_decay": 0.0, "lr": 0.02, "betas": (0.8, 0.99)},
    ]


def triton(parts: Sequence[nn.Parameter], **options: Any) -> AdamWTriton:
    return AdamWTriton(groups(parts), fused=True, **SETTINGS, **options)


def torch_own(parts: Sequence[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(parts), **SETTINGS, **options)


def gradients(parts: Sequence[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(part.shape, generator=generator).bfloat16().to(DEVICE) for part in parts]


def step(optimizer: torch.optim.Optimizer, parts: Sequence[nn.Parameter], seed: int, dtype: torch.dtype) -> None:
    for part, gradient in zip(parts, gradients(parts, seed), strict=True):
        part.grad = None
        part.grad_dtype = dtype
        part.grad = gradient.to(dtype)
    optimizer.step()


def doubles(parts: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(part.detach().double()) for part in parts]


def load(target: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Copy one optimizer's state into another, and keep the other's groups."""
    state = copy.deepcopy(source.state_dict()["state"])
    target.load_state_dict({"state": state, "param_groups": target.state_dict()["param_groups"]})


def weight_and_moments(optimizer: torch.optim.Optimizer, part: nn.Parameter) -> list[Tensor]:
    state = optimizer.state[part]
    return [part.detach(), *(tensor for name, tensor in state.items() if name != "step")]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"amsgrad": True, "maximize": True}])
@pytest.mark.parametrize("of_gradients", [WIDE, NARROW])
def test_float32_weights_equal_torch_in_float64(of_gradients: torch.dtype, options: dict[str, bool]) -> None:
    """Weights and moments after five steps are torch's in float64, to float32's rounding, by group."""
    ours = weights(WIDE)
    theirs = doubles(ours)
    mine, their = triton(ours, **options), torch_own(theirs, **options)
    for seed in range(5):
        step(mine, ours, seed, of_gradients)
        step(their, theirs, seed, torch.float64)
    for one, other in zip(ours, theirs, strict=True):
        assert mine.state[one]["step"] == 5
        assert mine.state[one].keys() == their.state[other].keys()
        for actual, expected in zip(weight_and_moments(mine, one), weight_and_moments(their, other), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_gradients", [WIDE, NARROW, torch.float16])
def test_bfloat16_is_rounded_to_the_nearest(of_gradients: torch.dtype) -> None:
    """From the same weights and state, all numbers are the nearest to torch's step in float64."""
    ours = weights(NARROW)
    mine = triton(ours)
    for seed in range(4):
        theirs = doubles(ours)
        their = torch_own(theirs)
        load(their, mine)
        step(mine, ours, seed, of_gradients)
        step(their, theirs, seed, torch.float64)
        for one, other in zip(ours, theirs, strict=True):
            for actual, expected in zip(weight_and_moments(mine, one), weight_and_moments(their, other), strict=True):
                # Half of the spacing of bfloat16, and what float32 adds to it.
                torch.testing.assert_close(actual.double(), expected, rtol=2**-8 * 1.001, atol=1e-6)


def test_state_moves_to_torch_and_back() -> None:
    """Two optimizers that step in turns and load each other's state equal one, and continue its step count."""
    ours, others, theirs = weights(WIDE), weights(WIDE), weights(WIDE)
    mine, other, their = triton(ours), torch_own(others), torch_own(theirs)
    for seed in range(6):
        here, there = ((mine, ours), (other, others))[:: 1 if seed % 2 else -1]
        load(here[0], there[0])
        with torch.no_grad():
            for part, source in zip(here[1], there[1], strict=True):
                part.copy_(source)
        step(*here, seed, WIDE)
        step(their, theirs, seed, WIDE)
    for one, expected in zip(ours, theirs, strict=True):
        assert mine.state[one].keys() == their.state[expected].keys()
        assert mine.state[one]["step"] == 6
        torch.testing.assert_close(
            weight_and_moments(mine, one), weight_and_moments(their, expected), rtol=1e-5, atol=1e-6
        )


def test_a_weight_without_a_gradient_keeps_its_state_and_count() -> None:
    """Like torch's, a step skips weights without a gradient, and uses the weights' own step counts later."""
    ours, theirs = weights(WIDE), weights(WIDE)
    mine, their = triton(ours), torch_own(theirs)
    for seed, without in enumerate((0, None, 2, 2, 0)):
        for optimizer, parts in ((mine, ours), (their, theirs)):
            for index, (part, gradient) in enumerate(zip(parts, gradients(parts, seed), strict=True)):
                part.grad = None if index == without else gradient.float()
            optimizer.step()
    assert [int(mine.state[part]["step"]) for part in ours] == [3, 5, 3, 5, 5, 5]
    for one, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            weight_and_moments(mine, one), weight_and_moments(their, expected), rtol=1e-5, atol=1e-6
        )


def test_a_step_that_the_device_skips_changes_nothing() -> None:
    """Weights, moments and step counts are bitwise unchanged; gradients that are not finite leave no trace."""
    ours, theirs = weights(NARROW), weights(NARROW)
    mine, their = triton(ours), triton(theirs)
    for seed, skipped in enumerate((True, False, True, False)):
        mine.found_inf = torch.tensor(float(skipped), device=DEVICE)
        step(mine, ours, seed, WIDE)
        if not skipped:
            step(their, theirs, seed, WIDE)
        else:
            for part in ours:
                part.grad = torch.full_like(part, torch.inf, dtype=WIDE)
            mine.step()
    assert_equal(mine.state_dict()["state"], their.state_dict()["state"])
    assert_equal(dict(enumerate(ours)), dict(enumerate(theirs)))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="is about weights on a CPU")
def test_cpu_uses_torch_fused_adamw() -> None:
    """Weights unsuitable for the kernel are trained by torch's fused optimizer."""
    assert type(create_fastest_adamw(groups(weights(WIDE)), **SETTINGS)) is torch.optim.AdamW
