"""Autoregressive sampling."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import BatchContext
from drawloom.components.sampling.generate import Sampler, draw


class Successor:
    """A model that predicts the next number, modulo five."""

    def __init__(self) -> None:
        self.longest = 0

    def infer(self, tokens: Tensor, shared: BatchContext) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % 5, 5).float() * 10


def drawn(model: Any, mesh: Any, **changes: Any) -> list[int]:
    """The continuation of 0."""
    options: dict[str, Any] = {"context": 3, "end": 4, "temperature": 0.0, **changes}
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(model=model, pipeline=mesh.group("pipeline"), generator=generator, **options)
    return list(sampler.continued([0], 6))


def test_greedy_sampling_stops_at_the_end(one_rank: Any) -> None:
    """At temperature 0 each token is the most likely one, and the end token ends the text without being in it."""
    assert drawn(Successor(), one_rank) == [1, 2, 3]


def test_the_model_sees_no_more_than_the_context(one_rank: Any) -> None:
    """A long text is truncated to its last tokens."""
    model = Successor()
    assert len(drawn(model, one_rank, end=9)) == 6 and model.longest == 3


def test_draws_follow_the_distribution() -> None:
    """Frequencies are near the softmax of the logits at the temperature, restricted to the top k."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.bincount(torch.tensor([draw(logits, 0.5, 2, generator) for _ in range(4000)]), minlength=4)
    expected = torch.softmax(torch.tensor([2.0, 4.0]), 0)
    torch.testing.assert_close(counts[1:3] / 4000, expected, atol=0.02, rtol=0)
    assert counts[0] == counts[3] == 0
