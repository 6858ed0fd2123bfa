"""
The circular pipeline as one program over stacked blocks.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. The idea: the stages of a pipeline
are one stack of blocks. In each iteration the whole stack runs on a stack of inputs, and what it gives moves on by one
stage, the last one's to the first. Nothing else is needed for a pipeline: with the stack dealt out over ranks, moving
on is a message to the neighbour, and the backward pass, which autograd writes, is a pipeline that runs the other way.

Every rank runs this one program and holds a share of the inputs and of the outputs, those that lie at its stages. So
embedding, head and loss can be dealt out over the pipeline's ranks too, instead of weighing on the first and the last.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from drawloom.components.pipeline.circular.one_pass import Pass
from drawloom.components.pipeline.circular.ring import Ring
from drawloom.components.pipeline.circular.stacked_blocks import (
    AtOnce,
    InTurn,
    Remat,
    SideOutputs,
    check_remat,
    stack_blocks,
    tensors_of,
)
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.storage.pytree import fill, leaves


class CircularPipeline(nn.Module):
    """
    Blocks one after another, on microbatches: `stages` of them at once, in as many repeats as it takes.

    Of the `repeats * stages` blocks of all ranks, a rank is given those of its stages (`blocks_of`), in order. A block
    takes a tensor, and what its microbatch shares if anything is shared, and gives a tensor of the same form, or a
    pair of that and a dict of side outputs, tensors of any shape. With `delayed` forwarding an output has an iteration
    in which to travel, and the pipeline is longer by `stages - 1` iterations.

    The module holds the blocks' parameters stacked, [repeats, own stages, ...], under their names in a block.
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
        self.own = own_stages(stages, self.ring)
        self.stages = stages
        self.repeats = _repeats(len(blocks), len(self.own))
        self.hop = 2 if delayed else 1
        self.remat = check_remat(remat)
        self.batched = batched and len(self.own) > 1
        self.block = stack_blocks(blocks, self.repeats)

    def forward(self, inputs: Tensor, shared: Any = None) -> Tensor | tuple[Tensor, SideOutputs]:
        """
        The outputs of this rank's share of microbatches; with side outputs of its blocks, if they have any.

        `inputs` and outputs are [microbatches, ...], the ranks' shares being equal and in the order of the ranks.
        `shared` is a tree of tensors [microbatches of all ranks, ...], of which a block gets its microbatch's row; all
        other leaves it gets as they are. Side outputs are [repeats, own stages, microbatches of all ranks, ...].
        All ranks go forward together, and then backward, each from its own outputs.
        """
        table = self.timetable(len(inputs) * self.ring.size)
        running = AtOnce(self.block, self.remat) if self.batched else InTurn(self.block, self.remat)
        rows = _rows(shared, table.microbatches)
        run = Pass.of(table, self.ring, self.own, running, inputs, rows, [*tensors_of(self.block).values()])
        for iteration in range(table.iterations):
            run.iterate(iteration)
        return run.results()

    def timetable(self, microbatches: int) -> Timetable:
        """When what happens; a ValueError if there can't be so many microbatches."""
        return Timetable(self.stages, microbatches, self.repeats, self.hop)


def own_stages(stages: int, ring: Ring) -> range:
    """The stages of a rank; a ValueError if they can't be dealt out evenly."""
    each, left = divmod(stages, ring.size)
    if left or not each:
        raise ValueError(
            f"{stages} stages can't be dealt out evenly to {ring.size} ranks; write {ring.size * max(1, each)}"
        )
    return range(ring.rank * each, (ring.rank + 1) * each)


def blocks_of(stages: int, repeats: int, ring: Ring) -> list[int]:
    """Which of all blocks a rank holds, in the order in which its pipeline takes them."""
    return [repeat * stages + stage for repeat in range(repeats) for stage in own_stages(stages, ring)]


def _repeats(blocks: int, stages: int) -> int:
    """In how many repeats a rank's stages pass through its blocks."""
    repeats, left = divmod(blocks, stages)
    if left or not repeats:
        fitting = f"{repeats * stages} or " if repeats else ""
        raise ValueError(
            f"{blocks} blocks are no whole number for each of {stages} stages; give {fitting}{(repeats + 1) * stages}"
        )
    return repeats


def _rows(shared: Any, microbatches: int) -> list[Any]:
    """What each microbatch shares."""
    columns = []
    for leaf in leaves(shared):
        if isinstance(leaf, Tensor) and (not leaf.ndim or len(leaf) != microbatches):
            raise ValueError(
                f"what is shared has a row for each of {microbatches} microbatches, not {tuple(leaf.shape)}"
            )
        columns.append(leaf.unbind() if isinstance(leaf, Tensor) else [leaf] * microbatches)
    return [fill(shared, row) for row in zip(*columns, strict=True)] if columns else [shared] * microbatches
