"""What all held-out data does."""

import torch

from drawloom.components.ports.data import ValidationData
from drawloom.graph.testing import expect


def it_is_the_same_every_time(one: ValidationData, other: ValidationData) -> None:
    """The same microbatches in the same order, whenever they are asked for."""
    first = [batch.tokens for batch in one.batches()]
    expect(first, "there is nothing to measure on")
    for again in ([batch.tokens for batch in one.batches()], [batch.tokens for batch in other.batches()]):
        expect(len(again) == len(first) and all(map(torch.equal, first, again)), "asked for again, it is another")
