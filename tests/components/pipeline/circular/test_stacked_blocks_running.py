"""Running the blocks of an iteration, batched or sequentially."""

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.circular.pipeline import CircularPipeline
from support.circular import EXACT, WIDTH, Block, Setup, gradient


class Direction(nn.Module):
    """x / |x|, which is not differentiable at zero, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt() * self.weight


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_the_bubble_gives_no_nan(delayed: bool, batched: bool) -> None:
    """A block that is not differentiable at zero gets no zeros from the bubble: gradients are finite and correct."""
    setup = Setup(3, 6, 2, delayed, batched=batched)
    pipeline = setup.pipeline([Direction() for _ in range(6)])
    pipeline(setup.inputs()).sin().sum().backward()
    blocks = [Direction() for _ in range(6)]
    nn.Sequential(*blocks)(setup.inputs()).sin().sum().backward()
    expected = torch.stack([gradient(block.weight) for block in blocks]).view(2, 3, WIDTH)
    torch.testing.assert_close(gradient(pipeline.get_parameter("block.weight")), expected, **EXACT)


class Branching(Block):
    """A block with control flow that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > 0 else x


def test_blocks_that_can_not_be_batched_are_refused() -> None:
    """Blocks with control flow run sequentially; batched, they are an error that names batched=False."""
    blocks, inputs = [Branching(), Branching()], Setup(2, 2).inputs()
    with pytest.raises(ValueError, match="write batched=False"):
        CircularPipeline(blocks, 2)(inputs)
    expected = torch.stack([blocks[1](blocks[0](x)) for x in inputs])
    torch.testing.assert_close(CircularPipeline(blocks, 2, batched=False)(inputs), expected, **EXACT)
