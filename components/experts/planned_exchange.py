"""Dispatch without communication: on one rank, or for plans on the meta device, where only shapes exist."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.local import LocalExperts
from drawloom.components.parallel.meta_collectives import emulate_collective, emulate_wait
from drawloom.ports import Dispatched, Kernels


def dispatch_if_one_rank_or_meta(
    kernels: Kernels,
    hidden: Tensor,
    chosen: Tensor,
    probabilities: Tensor,
    experts: int,
    ranks: int,
    waits: bool = True,
) -> Dispatched | None:
    """
    Dispatch tokens if there is one rank, or if the tensors are on the meta device; else return None.

    hidden is (tokens, width), chosen and probabilities (tokens, choices). Every rank has `experts` experts. The host
    `waits` for the number of rows.
    """
    if ranks == 1:
        return LocalExperts(kernels=kernels).dispatch(hidden, chosen, probabilities, experts)
    if not hidden.is_meta:
        return None
    if waits:
        emulate_wait(chosen)
    return dispatch_on_meta(kernels, hidden, chosen, probabilities, experts, ranks)


def dispatch_on_meta(
    kernels: Kernels, hidden: Tensor, chosen: Tensor, probabilities: Tensor, experts: int, ranks: int
) -> Dispatched:
    """
    Dispatch meta tensors: hidden (tokens, width), chosen and probabilities (tokens, choices).

    Every rank has `experts` experts. The plan assumes balanced experts, so a rank receives as many rows as its own
    tokens have choices.
    """
    # A token's average number of destination ranks, if its choices are uniform over ranks
    copies = ranks * (1 - (1 - 1 / ranks) ** chosen.shape[-1])
    sent = _Exchange.apply(hidden, copies, ranks)  # type: ignore[no-untyped-call]
    local = LocalExperts(kernels=kernels).dispatch(sent, chosen, probabilities, experts)
    return local._replace(combine=lambda rows: _Exchange.apply(local.combine(rows), copies, ranks))  # type: ignore[no-untyped-call]


class _Exchange(Function):
    """Exchange for meta tensors (tokens, width); a token is sent to several ranks, on average `copies`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: float, ranks: int) -> Tensor:
        """Return a new meta tensor like the tokens (tokens, width)."""
        ctx.copies, ctx.ranks = copies, ranks
        return _record_all_to_all(tokens, copies, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _record_all_to_all(grad, ctx.copies, ctx.ranks), None, None


def _record_all_to_all(tokens: Tensor, copies: float, ranks: int) -> Tensor:
    """Record an all-to-all with `copies` destination ranks per token; return a new meta tensor (tokens, width)."""
    message = tokens.clone()
    rows = message.new_empty(round(copies * len(tokens)), *tokens.shape[1:])
    emulate_collective(rows, rows.shape, "all_to_all", "expert", ranks)
    return torch.empty_like(tokens)
