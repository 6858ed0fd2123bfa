"""A forward pass on several ranks, each with its stages."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.p2p_links import p2p_links, ring
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.circular.pipeline import CircularPipeline, blocks_of
from drawloom.components.pipeline.circular.ring import Ring
from support.circular import Block, Outcome, Setup, assert_same, gradient, loss_of, sequential, split
from support.processes import run_ranks


class Wider(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)


class Rounding(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize(
    ("kind", "gave"), [(Wider, r"float64 \(2, 6\)"), (Rounding, r"float32 \(2, 3\)")], ids=["wider", "rounding"]
)
def test_blocks_that_change_shape_or_dtype_are_refused(kind: type[Block], gave: str) -> None:
    """A block's output must have the shape and dtype of its input; the error names both."""
    with pytest.raises(ValueError, match=rf"took float64 \(2, 3\) and gave {gave}"):
        CircularPipeline([kind()], 1)(Setup(1, 1).inputs())


def _on_ranks(setups: list[Setup]) -> list[Outcome]:
    """The results of each pipeline on this rank."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    size = processes.world_size
    place = Ring(processes.rank, size, p2p_links(processes, "pipeline", [list(range(size))], ring(size)))
    found = [_share(setup, place) for setup in setups]
    processes.close()
    return found


def _share(setup: Setup, ring: Ring) -> Outcome:
    """Outputs and gradients of this rank's microbatches and blocks."""
    pipeline = setup.pipeline(setup.blocks(), ring)
    inputs = setup.inputs().chunk(ring.size)[ring.rank].clone().requires_grad_()
    outputs, sides = split(pipeline(inputs, setup.shared()))
    loss = loss_of(outputs, sides, ring.rank * len(inputs))
    weight = pipeline.get_parameter("block.mix.weight")
    if setup.sharing:
        torch.autograd.backward(loss)
        found = gradient(inputs), gradient(weight)
    else:  # asking for some gradients only must not leave a neighbour waiting
        found = torch.autograd.grad(loss, (inputs, weight))  # type: ignore[assignment]
    table = {name: side.detach().flatten(0, 1) for name, side in sides.items()}
    return Outcome(outputs.detach(), found[0], found[1].flatten(0, 1), table)


def _together(setup: Setup, shares: Sequence[Outcome]) -> Outcome:
    """The results of all ranks, joined."""
    places = [
        place
        for rank in range(len(shares))
        for place in blocks_of(setup.stages, setup.repeats, Ring(rank, len(shares)))
    ]
    order = torch.argsort(torch.tensor(places))
    names = shares[0].sides
    return Outcome(
        torch.cat([share.outputs for share in shares]),
        torch.cat([share.inputs for share in shares]),
        torch.cat([share.weights for share in shares])[order],
        {name: torch.cat([share.sides[name] for share in shares])[order] for name in names},
    )


SHARDED = {
    2: [
        Setup(2, 2, 1),
        Setup(2, 2, 2, sharing=True),
        Setup(2, 4, 3, remat="everything"),
        Setup(2, 4, 2, delayed=True),
        Setup(2, 6, 2, delayed=True, sharing=True, remat="all_but_products"),
        Setup(4, 8, 2, sharing=True),
        Setup(4, 8, 2, delayed=True, remat="everything"),
        Setup(4, 4, 2, batched=False),
    ],
    3: [Setup(3, 6, 2, sharing=True), Setup(3, 9, 2, delayed=True), Setup(6, 6, 2)],
}
"""By ranks, pipelines with storage and without, delayed and not, with one stage a rank and two."""


@pytest.mark.parametrize("ranks", SHARDED)
def test_stages_can_be_sharded_over_ranks(ranks: int) -> None:
    """Ranks with shards of the stack and of the microbatches give together what one rank gives."""
    found = run_ranks(_on_ranks, ranks, SHARDED[ranks])
    for setup, shares in zip(SHARDED[ranks], zip(*found, strict=True), strict=True):
        assert_same(_together(setup, shares), sequential(setup))
