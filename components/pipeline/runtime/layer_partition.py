"""Which layers each stage holds, and whether a schedule, a mesh and a model go together."""

from collections.abc import Iterator

from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.pipeline import Schedule
from drawloom.graph import UserError
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem


def misfits(schedule: NodeView, mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """What is wrong with these together: a schedule for other ranks, or more stages than layers."""
    made = _made(schedule)
    if made is None:
        return
    ranks, layers = mesh.settings.get("pipeline", 1), model.settings.get("num_hidden_layers")
    try:
        stages = len(made.stage_to_rank(ranks))
    except UserError as error:
        yield mesh.problem("pipeline", str(error))
        return
    if isinstance(layers, int) and layers < stages:
        yield mesh.problem("pipeline", *_too_few(layers, ranks, made.stages_per_rank, model.name))


def _made(schedule: NodeView) -> Schedule | None:
    """The schedule itself, which costs nothing to make; None if something is wrong with it, which it says itself."""
    own = getattr(schedule.component, "constraints", None)
    if own is not None and any(own(schedule)):
        return None
    made: Schedule = schedule.component(**schedule.settings)
    return made


def _too_few(layers: int, ranks: int, per_rank: int, model: str) -> tuple[str, str]:
    stages = ranks * per_rank
    fewer = f"write pipeline = {layers // per_rank} or less, or " if layers >= per_rank else ""
    text = f"{layers} layers can't be split over {ranks} ranks with {per_rank} stages on each"
    return text, f"{fewer}write num_hidden_layers = {stages} or more in [{model}]"


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
