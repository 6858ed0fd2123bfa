"""A vocabulary in parts, on ranks of their own, against the whole."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.ports.model import VocabularyPart
from drawloom.kernels.cut_cross_entropy import LogitCut, cut_cross_entropy_eager
from drawloom.kernels.triton.cut_cross_entropy import cut_cross_entropy_triton
from drawloom.kernels.vocab_parallel import local_targets
from support.kernels import DEVICE
from support.processes import run_ranks

SPLIT = [0, 5, 6, 17]
"""Where the parts of three ranks begin and end: unequal, and one of a single word."""


def test_targets_of_a_part() -> None:
    """A rank knows its own targets by its own rows; others and ignored ones it does not know."""
    targets = torch.tensor([4, 5, 9, 10, -100])
    part = VocabularyPart(5, None)  # type: ignore[arg-type]
    assert local_targets(targets, 5, -100, part).tolist() == [-1, 0, 4, -1, -1]
    assert local_targets(targets, 20, -100, None).tolist() == [4, 5, 9, 10, -1]


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(17, (3, 4))
    targets[1, 2] = -100
    return torch.randn(3, 4, 6), torch.randn(17, 6), targets, torch.randn(3, 4)


def one_part() -> list[dict[str, Any]]:
    """What this rank finds out with its part of the weight, in plain torch and in Triton."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    hidden, weight, targets, grad = (each.to(DEVICE) for each in numbers())
    hidden.requires_grad_()
    weight = weight[SPLIT[rank] : SPLIT[rank + 1]].clone().requires_grad_()
    group = TorchGroup("world", range(3), dist.group.WORLD, torch.device("cpu"))
    cut = LogitCut(part=VocabularyPart(SPLIT[rank], group))
    found = []
    for function in (cut_cross_entropy_eager, cut_cross_entropy_triton):
        losses, lse = function(hidden, weight, targets, cut)
        grads = torch.autograd.grad((losses, lse), (hidden, weight), (grad, grad.flip(0)))
        parts = {"losses": losses, "lse": lse, "hidden": grads[0], "weight": grads[1]}
        found.append({name: part.tolist() for name, part in parts.items()})
    dist.destroy_process_group()
    return found


def test_parts_make_up_the_whole() -> None:
    """Every rank has losses, lse and the hidden states' gradient of the whole vocabulary, and its weights' own."""
    hidden, weight, targets, grad = numbers()
    hidden.requires_grad_()
    weight.requires_grad_()
    losses, lse = cut_cross_entropy_eager(hidden, weight, targets)
    of_hidden, of_weight = torch.autograd.grad((losses, lse), (hidden, weight), (grad, grad.flip(0)))
    for rank, found in ((rank, each) for rank, both in enumerate(run_ranks(one_part, 3)) for each in both):
        torch.testing.assert_close(torch.tensor(found["losses"]), losses.detach())
        torch.testing.assert_close(torch.tensor(found["lse"]), lse.detach())
        torch.testing.assert_close(torch.tensor(found["hidden"]), of_hidden)
        torch.testing.assert_close(torch.tensor(found["weight"]), of_weight[SPLIT[rank] : SPLIT[rank + 1]])
