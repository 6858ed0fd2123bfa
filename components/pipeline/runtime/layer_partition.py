"""Which layers each stage of a pipeline holds."""

from drawloom.components.ports.model import LayerRange


def partition_layers(layers: int, stages: int, before: int = 0, after: int = 0) -> list[LayerRange]:
    """
    Layers over stages as evenly as can be, the earlier stages taking one more where it does not come out even.

    `before` and `after` count the embedding and the head as that many layers, which the first and the last stage hold
    instead of real ones; every stage keeps one layer at least. Raises a ValueError for fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers over {stages} stages leave a stage without any")
    costs = [1] * stages
    costs[0] += before
    costs[-1] += after
    sizes = [1] * stages
    for _ in range(layers - stages):
        cheapest = costs.index(min(costs))
        costs[cheapest] += 1
        sizes[cheapest] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [
        LayerRange(end - size, end, embedding=stage == 0, head=stage == stages - 1)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
