"""Tokens one after another."""

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import Shared
from drawloom.components.sampling.generate import draw, generate


class Successor(nn.Module):
    """Expects the number after the last one, of five."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.longest = 0

    def forward(self, inputs: Tensor, shared: Shared) -> Tensor:
        self.longest = max(self.longest, inputs.shape[1])
        return nn.functional.one_hot((inputs + 1) % 5, 5).float() * 10


def drawn(module: Successor, **changes: float) -> list[int]:
    """What the model says after 0."""
    options = {"tokens": 6, "context": 3, "end": 4, "temperature": 0.0, "top_k": None, **changes}
    return list(generate(module, [0], generator=torch.Generator().manual_seed(0), **options))  # type: ignore[arg-type]


def test_the_likeliest_tokens_until_the_end() -> None:
    """At temperature 0 each token is the likeliest one, and the end token ends the text without being in it."""
    assert drawn(Successor()) == [1, 2, 3]


def test_the_model_sees_no_more_than_the_context() -> None:
    """A long text is cut to its last tokens before the model sees it."""
    module = Successor()
    assert len(drawn(module, end=9)) == 6 and module.longest == 3


def test_draws_follow_the_distribution() -> None:
    """Frequencies of draws are near the softmax of the logits at the temperature, within the top tokens only."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.bincount(torch.tensor([draw(logits, 0.5, 2, generator) for _ in range(4000)]), minlength=4)
    expected = torch.softmax(torch.tensor([2.0, 4.0]), 0)
    torch.testing.assert_close(counts[1:3] / 4000, expected, atol=0.02, rtol=0)
    assert counts[0] == counts[3] == 0
