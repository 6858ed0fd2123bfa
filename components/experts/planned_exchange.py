"""Dispatch without communication: on one rank, or for plans on the meta device, where only shapes exist."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.local import LocalExperts
from drawloom.components.parallel.meta_collectives import emulate_collective
from drawloom.ports import Dispatched, Kernels


def dispatch_if_one_rank_or_meta(
    kernels: Kernels,
    hidden: Tensor,
    chosen: Tensor,
    probabilities: Tensor,
    *,
    experts: int,
    ranks: int,
    capacity: float | None = None,
) -> Dispatched | None:
    """
    Dispatch tokens if there is one rank, or if the tensors are on the meta device; else return None.

    hidden is (tokens, width), chosen and probabilities (tokens, choices). Every rank has `experts` experts. In plans
    the host waits to count rows, unless there is a `capacity`: then this rank has most rows, `capacity` times as many
    as its own tokens have choices.
    """
    if ranks == 1:
        return LocalExperts(kernels=kernels).dispatch(hidden, chosen, probabilities, experts)
    if not hidden.is_meta:
        return None
    if capacity is None:
        emulate_collective(chosen, chosen.shape, "wait", "expert", ranks)
    # A token's average number of destination ranks, if its choices are uniform over ranks
    copies = ranks * (1 - (1 - 1 / ranks) ** chosen.shape[-1])
    received = math.ceil((capacity or 1) * len(hidden))
    tokens = _Exchange.apply(hidden, copies, ranks, received)  # type: ignore[no-untyped-call]
    # A rank copies choices and probabilities, too.
    chosen, probabilities = (F.pad(own, (0, 0, 0, received - len(hidden))) for own in (chosen, probabilities))
    local = LocalExperts(kernels=kernels).dispatch(tokens, chosen, probabilities, experts)
    return local._replace(
        combine=lambda rows: _Exchange.apply(local.combine(rows), copies, ranks, len(hidden))  # type: ignore[no-untyped-call]
    )


class _Exchange(Function):
    """Exchange for meta tensors (tokens, width); a token is sent to several ranks, on average `copies`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: float, ranks: int, received: int) -> Tensor:
        """Return a meta tensor for other tokens (received, width)."""
        ctx.copies, ctx.ranks, ctx.sent = copies, ranks, len(tokens)
        return _record_all_to_all(tokens, copies, ranks, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _record_all_to_all(grad, ctx.copies, ctx.ranks, ctx.sent), None, None, None


def _record_all_to_all(tokens: Tensor, copies: float, ranks: int, received: int) -> Tensor:
    """Record an all-to-all with `copies` destination ranks per token; return a meta tensor (received, width)."""
    message = tokens[:received].clone()
    rows = message.new_empty(round(copies * len(message)), *tokens.shape[1:])
    emulate_collective(rows, rows.shape, "all_to_all", "expert", ranks)
    return tokens.new_empty(received, *tokens.shape[1:])
