"""
The circular pipeline as one program over stacked blocks.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. The stages of a pipeline are one
stack of blocks. In each iteration the whole stack runs on a stack of inputs, and each output moves on by one stage, the
last stage's to the first. With the stack sharded over ranks, moving on is a message to the neighbour, and the backward
pass, which autograd derives, is a pipeline in the other direction.

Every rank runs this one program and holds a shard of the inputs and of the outputs, those of its stages. So embedding,
head and loss can be sharded over the pipeline's ranks too, instead of loading the first and the last rank.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from drawloom.components.pipeline.circular.one_pass import ForwardPass
from drawloom.components.pipeline.circular.ring import Ring
from drawloom.components.pipeline.circular.stacked_blocks import (
    BatchedBlocks,
    Remat,
    SequentialBlocks,
    SideOutputs,
    check_remat,
    stack_blocks,
    tensors_of,
)
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.storage.pytree import fill, leaves


class CircularPipeline(nn.Module):
    """
    Blocks applied in sequence to microbatches: `stages` of them at a time, in as many repeats as there are blocks.

    Of the `repeats * stages` blocks of all ranks, a rank gets those of its stages (`blocks_of`), in order. A block
    takes a tensor, and its microbatch's shared value if there is one, and returns a tensor of the same shape and dtype,
    or a pair of that and a dict of side outputs, tensors of any shape. With `delayed` forwarding an output has an
    iteration in which to travel, and the pipeline takes `stages - 1` iterations more.

    The module's parameters are the blocks', stacked (repeats, local stages, ...), under their names in a block.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        stages: int,
        *,
        delayed: bool = False,
        remat: Remat = "nothing",
        batched: bool = True,
        ring: Ring | None = None,
    ) -> None:
        super().__init__()
        self.ring = Ring() if ring is None else ring
        self.local_stages = stages_of_rank(stages, self.ring)
        self.stages = stages
        self.repeats = _repeats(len(blocks), len(self.local_stages))
        self.latency = 2 if delayed else 1
        self.remat = check_remat(remat)
        # A batch of one stage would pay vmap's overhead for nothing.
        self.batched = batched and len(self.local_stages) > 1
        self.block = stack_blocks(blocks, self.repeats)

    def forward(self, inputs: Tensor, shared: Any = None) -> Tensor | tuple[Tensor, SideOutputs]:
        """
        The outputs of this rank's microbatches; with side outputs of its blocks, if they have any.

        `inputs` and outputs: (microbatches, ...), equal shards in the order of the ranks. `shared`: a pytree of tensors
        (microbatches of all ranks, ...), of which a block gets its microbatch's row; other leaves are passed as they
        are. Side outputs: (repeats, local stages, microbatches of all ranks, ...). All ranks must call forward
        together, and then run the backward pass, each from its own outputs.
        """
        table = self.timetable(len(inputs) * self.ring.size)
        runner = BatchedBlocks(self.block, self.remat) if self.batched else SequentialBlocks(self.block, self.remat)
        rows = _rows(shared, table.microbatches)
        run = ForwardPass.of(
            table, self.ring, self.local_stages, runner, inputs, rows, [*tensors_of(self.block).values()]
        )
        for iteration in range(table.iterations):
            run.iterate(iteration)
        return run.results()

    def timetable(self, microbatches: int) -> Timetable:
        """The timetable for this many microbatches; ValueError if the pipeline can't run so many."""
        return Timetable(self.stages, microbatches, self.repeats, self.latency)


def stages_of_rank(stages: int, ring: Ring) -> range:
    """The stages of a rank; ValueError if they can't be divided evenly."""
    each, left = divmod(stages, ring.size)
    if left or not each:
        raise ValueError(
            f"{stages} stages can't be divided evenly among {ring.size} ranks; write {ring.size * max(1, each)}"
        )
    return range(ring.rank * each, (ring.rank + 1) * each)


def blocks_of(stages: int, repeats: int, ring: Ring) -> list[int]:
    """The indices of a rank's blocks among all blocks, in the order in which its pipeline takes them."""
    return [repeat * stages + stage for repeat in range(repeats) for stage in stages_of_rank(stages, ring)]


def _repeats(blocks: int, stages: int) -> int:
    """The number of repeats in which a rank's stages pass through its blocks."""
    repeats, left = divmod(blocks, stages)
    if left or not repeats:
        fitting = f"{repeats * stages} or " if repeats else ""
        raise ValueError(
            f"{blocks} blocks can't be divided evenly among {stages} stages; give {fitting}{(repeats + 1) * stages}"
        )
    return repeats


def _rows(shared: Any, microbatches: int) -> list[Any]:
    """The shared value of each microbatch."""
    columns = []
    for leaf in leaves(shared):
        if isinstance(leaf, Tensor) and (not leaf.ndim or len(leaf) != microbatches):
            raise ValueError(
                f"shared tensors have a row for each of {microbatches} microbatches, but one is {tuple(leaf.shape)}"
            )
        columns.append(leaf.unbind() if isinstance(leaf, Tensor) else [leaf] * microbatches)
    return [fill(shared, row) for row in zip(*columns, strict=True)] if columns else [shared] * microbatches
