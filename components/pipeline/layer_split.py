"""Which layers each stage of a pipeline holds."""

from drawloom.components.ports.model import Span


def split_layers(layers: int, stages: int, before: int = 0, after: int = 0) -> list[Span]:
    """
    Layers over stages as evenly as can be, the earlier stages taking one more where it does not come out even.

    `before` and `after` count the embedding and the head as that many layers, which the first and the last stage hold
    instead of real ones. Raises a ValueError if a stage would be left without a layer.
    """
    share, extra = divmod(layers + before + after, stages)
    sizes = [share + (stage < extra) for stage in range(stages)]
    sizes[0] -= before
    sizes[-1] -= after
    if min(sizes) < 1:
        raise ValueError(f"{layers} layers over {stages} stages leave a stage without any (stages hold {sizes})")
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [
        Span(end - size, end, embedding=stage == 0, head=stage == stages - 1)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
