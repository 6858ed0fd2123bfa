"""What all randomness is."""

import torch

from drawloom.components.ports.run import Randomness
from drawloom.graph.testing import expect


def _draw(randomness: Randomness, *purpose: str | int) -> list[float]:
    return torch.rand(4, generator=randomness.stream(*purpose)).tolist()


def it_follows_from_the_purpose(one: Randomness, other: Randomness) -> None:
    """The same purpose draws the same, whatever was drawn before."""
    first = _draw(one, "dropout", 3)
    _draw(other, "something else")
    torch.rand(7)
    expect(
        _draw(other, "dropout", 3) == first == _draw(one, "dropout", 3), "what was drawn before changes what is drawn"
    )


def purposes_differ(randomness: Randomness) -> None:
    """Other purposes draw otherwise, also those that look alike."""
    purposes: list[tuple[str | int, ...]] = [("a",), ("b",), ("a", 1), ("a", 2), ("a", "1"), ("a1",), (1, "a")]
    draws = [tuple(_draw(randomness, *purpose)) for purpose in purposes]
    expect(len(set(draws)) == len(draws), "two purposes draw the same")
