"""A walk through a sequence as text: a line for each member, and below it what the member does to which values."""

from collections.abc import Iterator

from drawloom.graph.drawing.step import Step


def draw_step_text(step: Step) -> str:
    """Members in order, numbered from 1."""
    return "\n".join([step.title, *_lines(step)]) + "\n"


def _lines(step: Step) -> Iterator[str]:
    for number, box in enumerate(step.members):
        yield f"{number + 1:3d}. [{box.name}] {box.use}"
        for verb in ("reads", "changes", "writes"):
            values = [thread.title for thread in step.threads if thread.touches.get(number) == verb]
            if values:
                yield f"     {verb} {', '.join(values)}"
