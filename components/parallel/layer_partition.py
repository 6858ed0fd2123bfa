"""A model's layers, partitioned over pipeline stages."""

from collections.abc import Sequence
from itertools import accumulate

import attrs

from drawloom.ports import LayerRange


def partition_layers(layers: int, stages: int, embedding_cost: int = 0, head_cost: int = 0) -> list[LayerRange]:
    """
    Divide layers over stages as evenly as possible; a remainder goes to the earlier stages.

    Both costs are in layers: the first and the last stage get so many layers less, but at least one. Raises ValueError
    for fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers over {stages} stages leave a stage without a layer")
    costs = [1] * stages
    costs[0] += embedding_cost
    costs[-1] += head_cost
    sizes = [1] * stages
    # Each further layer goes to the cheapest stage so far, the first one if several cost the same.
    for _ in range(layers - stages):
        cheapest = costs.index(min(costs))
        costs[cheapest] += 1
        sizes[cheapest] += 1
    return build_layer_ranges(sizes)


def build_layer_ranges(sizes: Sequence[int]) -> list[LayerRange]:
    """Return stages with these layer counts; the first has the embedding and the last the head."""
    ends, last = accumulate(sizes), len(sizes) - 1
    return [
        LayerRange(end - size, end, embedding=stage == 0, head=stage == last)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def split_off_embedding_and_head(spans: Sequence[LayerRange], layers: int) -> list[LayerRange]:
    """
    Return the same spans without embedding and head, between the embedding's span and the head's span.

    The head's span also has the model's `layers` after the other spans.
    """
    inner = [attrs.evolve(span, embedding=False, head=False) for span in spans]
    head = LayerRange(spans[-1].last, layers, embedding=False, head=True)
    return [LayerRange(0, 0, embedding=True, head=False), *inner, head]
