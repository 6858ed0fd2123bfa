"""Stacking blocks into one module."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from drawloom.components.pipeline.circular.stacked_blocks import rows_of, stack_blocks, tensors_of


class Tied(nn.Module):
    """Two layers that share a weight, and a table that is not trained."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, number)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.full((2,), number))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) + self.table


def test_rows_are_blocks() -> None:
    """A row of the stacked tensors holds the parameters and buffers of its block, ties included, in order."""
    blocks = [Tied(float(number)) for number in range(6)]
    stacked = stack_blocks(blocks, repeats=2)
    assert {name: tuple(tensor.shape) for name, tensor in tensors_of(stacked).items()} == {
        "first.weight": (2, 3, 2, 2),
        "table": (2, 3, 2),
    }
    x = torch.randn(4, 2)
    rows = list(rows_of(stacked))
    assert [(repeat, stage) for repeat, stage, _ in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for block, (_, _, row) in zip(blocks, rows, strict=True):
        torch.testing.assert_close(functional_call(stacked, row, (x,)), block(x))


def test_rows_are_views() -> None:
    """A write into a block's row is a write into the stack, so weights can be loaded by their names in a block."""
    stacked = stack_blocks([nn.Linear(2, 2) for _ in range(4)], repeats=2)
    for repeat, stage, row in rows_of(stacked):
        row["weight"].fill_(10 * repeat + stage)
    assert stacked.weight[:, :, 0, 0].tolist() == [[0, 1], [10, 11]]  # type: ignore[index]


def test_a_stack_is_a_copy_of_its_blocks() -> None:
    """Blocks stay as they were, and training the stack does not change them."""
    blocks = [nn.Linear(2, 2) for _ in range(2)]
    before = [block.weight.detach().clone() for block in blocks]
    stacked = stack_blocks(blocks, repeats=1)
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter.zero_()
    assert all(torch.equal(block.weight, weight) for block, weight in zip(blocks, before, strict=True))
    assert all(isinstance(parameter, nn.Parameter) for parameter in stacked.parameters())


def test_blocks_can_be_stacked_on_the_meta_device() -> None:
    """Blocks on the meta device make a stack there."""
    with torch.device("meta"):
        stacked = stack_blocks([nn.Linear(2, 3) for _ in range(4)], repeats=2)
    assert {(tensor.device.type, tuple(tensor.shape)) for tensor in tensors_of(stacked).values()} == {
        ("meta", (2, 2, 3, 2)),
        ("meta", (2, 2, 3)),
    }


FAULTS: dict[str, tuple[list[nn.Module], int, str]] = {
    "count": ([nn.Linear(1, 1)] * 3, 2, "3 blocks are not 2 repeats of the same number of stages"),
    "none": ([], 1, "0 blocks are not 1 repeats of the same number of stages"),
    "names": ([nn.Linear(1, 1), nn.Linear(1, 1, bias=False)], 1, "blocks 0 and 1 have different parameters: bias"),
    "shapes": (
        [nn.Linear(1, 1), nn.Linear(2, 1)],
        1,
        "blocks 0 and 1 differ in weight: float32 (1, 1) (trained) and float32 (1, 2) (trained)",
    ),
    "dtypes": (
        [nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False)],
        1,
        "blocks 0 and 1 differ in weight: float64 (1, 1) (trained) and float32 (1, 1) (trained)",
    ),
    "frozen": (
        [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).requires_grad_(False)],
        1,
        "blocks 0 and 1 differ in weight: float32 (1, 1) (trained) and float32 (1, 1)",
    ),
    "no parameters": ([nn.Identity()], 1, "a block without parameters can't be stacked"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_that_differ_are_refused(fault: str) -> None:
    """The error names the blocks and their difference."""
    blocks, repeats, message = FAULTS[fault]
    with pytest.raises(ValueError) as caught:
        stack_blocks(blocks, repeats)
    assert str(caught.value) == message
