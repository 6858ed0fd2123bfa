"""Small circular pipelines, and the same blocks one after another."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.circular.pipeline import CircularPipeline, blocks_of
from drawloom.components.pipeline.circular.ring import Ring
from drawloom.components.pipeline.circular.stacked_blocks import Remat

WIDTH = 3
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@attrs.frozen
class Positions:
    """What blocks share: a tensor with a row for each microbatch, and something that is the same for all."""

    offset: Tensor
    scale: float


class Block(nn.Module):
    """Adds a little to what comes in; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class SharingBlock(nn.Module):
    """A block that uses what is shared, and has side outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, shared: Positions) -> tuple[Tensor, dict[str, Tensor]]:
        inside = torch.tanh(self.mix(x) + shared.offset * shared.scale)
        return x + inside, {"balance": inside.square().mean(), "rows": inside.sum(0)}


@attrs.frozen
class Setup:
    """A pipeline: stages, microbatches, repeats, and how it runs."""

    stages: int
    microbatches: int
    repeats: int = 1
    delayed: bool = False
    remat: Remat = "nothing"
    batched: bool = True
    sharing: bool = False

    def blocks(self) -> list[Any]:
        torch.manual_seed(0)
        return [SharingBlock() if self.sharing else Block() for _ in range(self.stages * self.repeats)]

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.microbatches, 2, WIDTH, dtype=torch.float64, generator=generator)

    def shared(self) -> Positions | None:
        offset = torch.linspace(-1, 1, self.microbatches, dtype=torch.float64).reshape(-1, 1, 1)
        return Positions(offset.expand(-1, 2, WIDTH), 0.5) if self.sharing else None

    def pipeline(self, blocks: Sequence[nn.Module], ring: Ring | None = None) -> CircularPipeline:
        local_blocks = blocks_of(self.stages, self.repeats, ring or Ring())
        options: dict[str, Any] = {"delayed": self.delayed, "remat": self.remat, "batched": self.batched}
        return CircularPipeline([blocks[place] for place in local_blocks], self.stages, ring=ring, **options)


@attrs.frozen
class Outcome:
    """Outputs, gradients of inputs, gradients of each block's weight, and side outputs [blocks, microbatches, ...]."""

    outputs: Tensor
    inputs: Tensor
    weights: Tensor
    sides: dict[str, Tensor]


def loss_of(outputs: Tensor, sides: dict[str, Tensor], first: int = 0) -> Tensor:
    """A sum in which every number counts, and each microbatch (numbered from `first`) in its own way."""
    factors = torch.arange(first + 1, first + len(outputs) + 1, dtype=torch.float64)
    total = (outputs.sin().flatten(1).sum(1) * factors).sum()
    return total + sum((side * side).sum() for side in sides.values())


def sequential(setup: Setup) -> Outcome:
    """The blocks one after another, microbatch by microbatch."""
    blocks, inputs, shared = setup.blocks(), setup.inputs().requires_grad_(), setup.shared()
    outputs, sides = [], []
    for microbatch, x in enumerate(inputs.unbind()):
        row = Positions(shared.offset[microbatch], shared.scale) if shared else None
        for block in blocks:
            if row is None:
                x = block(x)
            else:
                x, side = block(x, row)
                sides.append(side)
        outputs.append(x)
    names = sides[0] if sides else {}
    columns = {name: torch.stack([side[name] for side in sides]) for name in names}
    table = {
        name: side.view(setup.microbatches, len(blocks), *side.shape[1:]).transpose(0, 1)
        for name, side in columns.items()
    }
    torch.autograd.backward(loss_of(torch.stack(outputs), table))
    return _outcome(torch.stack(outputs), inputs, torch.stack([gradient(block.mix.weight) for block in blocks]), table)


def pipelined(setup: Setup) -> Outcome:
    """The same blocks as a pipeline."""
    pipeline, inputs = setup.pipeline(setup.blocks()), setup.inputs().requires_grad_()
    outputs, sides = split(pipeline(inputs, setup.shared()))
    torch.autograd.backward(loss_of(outputs, sides))
    table = {name: side.flatten(0, 1) for name, side in sides.items()}
    return _outcome(outputs, inputs, gradient(pipeline.get_parameter("block.mix.weight")).flatten(0, 1), table)


def _outcome(outputs: Tensor, inputs: Tensor, weights: Tensor, sides: dict[str, Tensor]) -> Outcome:
    return Outcome(outputs.detach(), gradient(inputs), weights, {name: side.detach() for name, side in sides.items()})


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def split(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return (result, {}) if isinstance(result, Tensor) else result


def assert_same(one: Outcome, other: Outcome) -> None:
    """Equal to 1e-12 in all that both have."""
    for name in ("outputs", "inputs", "weights", "sides"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), **EXACT)
