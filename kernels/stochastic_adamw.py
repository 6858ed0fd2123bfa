"""
AdamW on bfloat16 weights with stochastic rounding: no float32 copy of the weights, and no small step is lost.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; every operation in float32, each
rounded by itself, so that the implementations agree to the bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drawloom.kernels.stochastic_copy import AT_ONCE, halves, philox, round_stochastically

PER_DRAW = 2
"""Of the four words of a draw, one rounds the weights of two elements, one their means, one their squares."""


@dataclass(frozen=True)
class Trained:
    """
    A weight, float32 or bfloat16, with its running means of gradients and of their squares (float32 or bfloat16).

    `decay` is what fraction of the weight is lost each step, times the rate. The noise of an element is a function of
    `key`, the step's counter, and `first` + the element's place; `first` is even.
    """

    weight: Tensor
    mean: Tensor
    square: Tensor
    decay: float
    key: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.first % PER_DRAW:
            raise ValueError(f"first = {self.first} is odd")
        if self.mean.dtype != self.square.dtype:
            raise ValueError(f"the running means have two dtypes, {self.mean.dtype} and {self.square.dtype}")


def numbers_of(rate: float, betas: tuple[float, float], eps: float, step: int) -> tuple[float, ...]:
    """Rate, weights of the new in both means, rate and root of squares with their bias corrected, eps; steps from 1."""
    of_mean, of_square = betas
    corrected = rate / (1 - of_mean**step), (1 - of_square**step) ** -0.5
    return rate, 1 - of_mean, 1 - of_square, *corrected, eps


class StochasticAdamwEager:
    """Takes steps with plain torch, one weight after another."""

    def __init__(self, trained: Sequence[Trained]) -> None:
        self._trained = trained

    def step(self, gradients: Sequence[Tensor], numbers: tuple[float, ...], counter: int) -> None:
        """Change all weights and means in place; gradients are in the order of the weights."""
        for trained, gradient in zip(self._trained, gradients, strict=True):
            _step(trained, gradient.reshape(-1), torch.tensor(numbers, dtype=torch.float32).tolist(), counter)


def _step(trained: Trained, gradient: Tensor, numbers: list[float], counter: int) -> None:
    tensors = trained.weight, trained.mean, trained.square
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for place in range(0, gradient.numel(), AT_ONCE):
        part = slice(place, place + AT_ONCE)
        values = [tensor[part] for tensor in flat]
        results = _updated(values, gradient[part], trained.decay, numbers)
        noise = _noise(len(values[0]), trained.key, counter, trained.first + place, gradient.device)
        for value, result, drawn in zip(values, results, noise, strict=False):
            value.copy_(round_stochastically(result, drawn) if value.dtype == torch.bfloat16 else result)
    for tensor, changed in zip(tensors, flat, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(changed.view(tensor.shape))


def _updated(values: list[Tensor], gradient: Tensor, decay: float, numbers: list[float]) -> tuple[Tensor, ...]:
    """Weight, mean and square after a step, in float32."""
    rate, new_in_mean, new_in_square, corrected_rate, correction, eps = numbers
    weight, mean, square = (value.float() for value in values)
    gradient = gradient.float()
    mean = mean + (gradient - mean) * new_in_mean
    square = square + (gradient * gradient - square) * new_in_square
    lost = (torch.tensor(rate) * torch.tensor(decay)).item()
    weight = weight - weight * lost
    root = square.double().sqrt().float()  # torch's root of float32 is off by a bit here and there on CPUs
    return weight - (mean * corrected_rate) / (root * correction + eps), mean, square


def _noise(count: int, key: int, counter: int, first: int, device: torch.device) -> Iterator[Tensor]:
    """16 random bits for each element: for the weights, then for the means, then for the squares."""
    draws = torch.arange(first // PER_DRAW, -(-(first + count) // PER_DRAW), device=device)
    return (halves(words)[:count] for words in philox(key, draws, counter))
