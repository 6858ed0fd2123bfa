"""Tokens that travel between ranks which do not run: shapes on the meta device, and what would be sent."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.local import LocalExperts
from drawloom.components.parallel.meta_collectives import collective
from drawloom.components.ports.experts import Dispatched, ExpertKernels


def without_exchange(
    kernels: ExpertKernels, hidden: Tensor, chosen: Tensor, probabilities: Tensor, experts: int, ranks: int
) -> Dispatched | None:
    """
    What a dispatcher gives where nothing travels: to one rank with all its `experts`, or for meta tensors; else None.

    hidden (tokens, width), chosen and probabilities (tokens, choices).
    """
    if ranks == 1:
        return LocalExperts(kernels=kernels).dispatch(hidden, chosen, probabilities, experts)
    return planned_dispatch(kernels, hidden, chosen, probabilities, experts, ranks) if hidden.is_meta else None


def planned_dispatch(
    kernels: ExpertKernels, hidden: Tensor, chosen: Tensor, probabilities: Tensor, experts: int, ranks: int
) -> Dispatched:
    """
    What a dispatcher gives for meta tensors hidden (tokens, width), chosen and probabilities (tokens, choices), with so
    many experts on each rank. Without values the choices are those of other ranks, too: each rank gets as many rows as
    it has choices.
    """
    copies = _copies(chosen.shape[-1], ranks)
    sent = _Exchange.apply(hidden, copies, ranks)  # type: ignore[no-untyped-call]
    local = LocalExperts(kernels=kernels).dispatch(sent, chosen, probabilities, experts)
    return local._replace(combine=lambda rows: _Exchange.apply(local.combine(rows), copies, ranks))  # type: ignore[no-untyped-call]


def _copies(choices: int, ranks: int) -> float:
    """To how many ranks a token travels on average, if each of its choices falls on any rank alike."""
    return ranks * (1 - (1 - 1 / ranks) ** choices)


class _Exchange(Function):
    """A meta tensor (tokens, width) that is sent to and fro, some copies of each token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: float, ranks: int) -> Tensor:
        """A new meta tensor like the tokens (tokens, width)."""
        ctx.copies, ctx.ranks = copies, ranks
        return _travelled(tokens, copies, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _travelled(grad, ctx.copies, ctx.ranks), None, None


def _travelled(tokens: Tensor, copies: float, ranks: int) -> Tensor:
    rows = tokens.new_empty(round(copies * len(tokens)), *tokens.shape[1:])
    collective(rows, rows.shape, "all_to_all", "expert", ranks)
    return torch.empty_like(tokens)
