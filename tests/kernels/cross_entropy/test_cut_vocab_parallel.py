"""A vocabulary split over ranks, against the whole vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import TorchGroup
from drawloom.components.ports.model import VocabularyPart
from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager, find_local_target_rows
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton
from support.kernels import DEVICE
from support.processes import run_ranks

SPLIT = [0, 5, 6, 17]
"""Bounds of the parts of three ranks, which are unequal; one part is a single word."""


def test_targets_become_local_rows() -> None:
    """Targets on this rank become local rows; targets on other ranks and ignored ones become -1."""
    targets = torch.tensor([4, 5, 9, 10, -100])
    part = VocabularyPart(5, None)  # type: ignore[arg-type]
    assert find_local_target_rows(targets, 5, -100, part).tolist() == [-1, 0, 4, -1, -1]
    assert find_local_target_rows(targets, 20, -100, None).tolist() == [4, 5, 9, 10, -1]


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(17, (3, 4))
    targets[1, 2] = -100
    return torch.randn(3, 4, 6), torch.randn(17, 6), targets, torch.randn(3, 4)


def one_part() -> list[dict[str, Any]]:
    """Return losses, lse and gradients for this rank's part of the weight, in plain torch and in Triton."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    hidden, weight, targets, grad = (tensor.to(DEVICE) for tensor in numbers())
    hidden.requires_grad_()
    weight = weight[SPLIT[rank] : SPLIT[rank + 1]].clone().requires_grad_()
    group = TorchGroup("world", range(3), dist.group.WORLD, torch.device("cpu"))
    cut = LogitCut(part=VocabularyPart(SPLIT[rank], group))
    actual = []
    for function in (cut_cross_entropy_eager, cut_cross_entropy_triton):
        losses, lse = function(hidden, weight, targets, cut)
        grads = torch.autograd.grad((losses, lse), (hidden, weight), (grad, grad.flip(0)))
        parts = {"losses": losses, "lse": lse, "hidden": grads[0], "weight": grads[1]}
        actual.append({name: part.tolist() for name, part in parts.items()})
    dist.destroy_process_group()
    return actual


def test_ranks_compute_the_loss_of_the_whole_vocabulary() -> None:
    """Every rank computes losses, lse and hidden gradients of the whole vocabulary, and its own weight gradients."""
    hidden, weight, targets, grad = numbers()
    hidden.requires_grad_()
    weight.requires_grad_()
    losses, lse = cut_cross_entropy_eager(hidden, weight, targets)
    grad_hidden, grad_weight = torch.autograd.grad((losses, lse), (hidden, weight), (grad, grad.flip(0)))
    runs = run_ranks(one_part, 3)
    for rank, actual in ((rank, values) for rank, both in enumerate(runs) for values in both):
        torch.testing.assert_close(torch.tensor(actual["losses"]), losses.detach())
        torch.testing.assert_close(torch.tensor(actual["lse"]), lse.detach())
        torch.testing.assert_close(torch.tensor(actual["hidden"]), grad_hidden)
        torch.testing.assert_close(torch.tensor(actual["weight"]), grad_weight[SPLIT[rank] : SPLIT[rank + 1]])
