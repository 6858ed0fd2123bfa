"""Recomputation of activations in the backward pass."""

from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drawloom.components.pipeline.circular.pipeline import CircularPipeline
from drawloom.components.pipeline.circular.stacked_blocks import Remat
from support.circular import EXACT, WIDTH, Block, Setup, gradient


class Counting(Block):
    """A block that counts its runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(x)


@pytest.mark.parametrize(("remat", "times"), [("nothing", 1), ("everything", 2), ("all_but_products", 2)])
def test_blocks_run_once_for_each_microbatch_and_again_to_recompute(remat: Remat, times: int) -> None:
    """Nothing runs in the bubble, and what is recomputed runs once more."""
    Counting.runs = 0
    pipeline = CircularPipeline([Counting() for _ in range(6)], 3, remat=remat, batched=False)
    pipeline(torch.randn(6, 2, WIDTH, dtype=torch.float64)).sum().backward()
    assert Counting.runs == times * 6 * 6


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matmuls and tanh."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0
        self.tangents = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.products += name in ("mm", "bmm", "addmm", "baddbmm")
        self.tangents += name == "tanh"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("batched", [True, False])
def test_recomputation_follows_the_policy(batched: bool) -> None:
    """ "everything" recomputes all operations, "all_but_products" all but matmuls, "nothing" none."""
    counts = {}
    for remat in get_args(Remat):
        setup = Setup(2, 4, 2, remat=remat, batched=batched)
        pipeline, inputs = setup.pipeline(setup.blocks()), setup.inputs()
        with Products() as counted:
            pipeline(inputs).sum().backward()
        counts[remat] = (counted.products, counted.tangents)
    (products, tangents), everything, cheap = (counts[name] for name in ("nothing", "everything", "all_but_products"))
    assert everything[0] > products
    assert everything[1] == cheap[1] == 2 * tangents
    assert cheap[0] == products


def test_remat_saves_only_the_inputs_of_stages() -> None:
    """Between forward and backward, activations inside a stage are not in memory."""
    kept: dict[str, int] = {}

    def keep(tensor: Tensor, remat: str) -> Tensor:
        kept[remat] += 1
        return tensor

    for remat in ("nothing", "everything"):
        setup = Setup(3, 6, 2, remat=remat, batched=False)
        pipeline, inputs = setup.pipeline(setup.blocks()), setup.inputs()
        kept[remat] = 0
        with torch.autograd.graph.saved_tensors_hooks(partial(keep, remat=remat), lambda tensor: tensor):
            pipeline(inputs)
    assert kept["nothing"] > 0
    assert kept["everything"] == 0


@pytest.mark.parametrize("batched", [False, True])
def test_recomputation_reproduces_random_numbers(batched: bool) -> None:
    """Dropout masks are the same in the recomputed pass, and differ by stage and microbatch."""
    found = []
    for remat in get_args(Remat):
        blocks = [nn.Sequential(block, nn.Dropout(0.5)) for block in Setup(2, 2).blocks()]
        pipeline = CircularPipeline(blocks, 2, remat=remat, batched=batched)
        inputs = torch.ones(4, 8, WIDTH, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(5)
        outputs = pipeline(inputs)
        outputs.sum().backward()
        assert len({tuple((row == 0).flatten().tolist()) for row in outputs}) == 4
        found.append(gradient(inputs))
    torch.testing.assert_close(found[1:], found[:1] * 2, **EXACT)


@pytest.mark.parametrize("name", ["all", "none", "Everything", ""])
def test_an_unknown_policy_is_refused(name: Any) -> None:
    """An unknown policy is an error that lists the known ones."""
    known = "write one of 'nothing', 'everything', 'all_but_products'"
    with pytest.raises(ValueError, match=f"remat='{name}' is not a policy; {known}"):
        CircularPipeline([Block(), Block()], 2, remat=name)
