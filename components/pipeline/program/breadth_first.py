"""All microbatches through one stage of a rank, then all through its next; and back the same way."""

from drawloom.components.pipeline.program.row_builder import backward, build_program, forward
from drawloom.components.ports.program import Program


def breadth_first(owners: tuple[int, ...], ranks: int, microbatches: int, *, train: bool = True) -> Program:
    """What each rank computes, in order; forwards alone if not to `train`."""
    stages = range(len(owners) // ranks)
    row = [forward(own) for own in stages for _ in range(microbatches)]
    if train:
        row += [backward(own) for own in reversed(stages) for _ in range(microbatches)]
    return build_program([row] * ranks, owners, microbatches, newest_first=True)
