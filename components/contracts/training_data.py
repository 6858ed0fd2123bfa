"""What all training data does."""

import torch

from drawloom.components.ports.data import TrainingData
from drawloom.graph.testing import expect

STEPS = 3


def it_is_a_function_of_the_step(one: TrainingData, other: TrainingData) -> None:
    """Two that are made alike give the same microbatches step by step."""
    for step in range(STEPS):
        ours, theirs = one.next_step(), other.next_step()
        expect(ours and len(ours) == len(theirs), f"step {step + 1} has {len(ours)} and {len(theirs)} microbatches")
        same = all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))
        expect(same, f"step {step + 1} is another for another that is made alike")


def steps_differ(data: TrainingData) -> None:
    """One step after another is other data."""
    first, second = (torch.cat([batch.tokens for batch in data.next_step()]) for _ in range(2))
    expect(not torch.equal(first, second), "the second step is the first again")
