"""Mixture of experts: where each token's copies go, copying them to their experts, and summing what comes back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.operation import own

NOBODY = -1
"""The expert of a choice that is not to be computed, and the row of such a choice."""


class Routes(NamedTuple):
    """
    A table of rows by choice, and of choices by row.

    `rows` int32 (tokens, choices): the row of each choice, or -1. `choices` int32 (tokens * choices,): the number of
    the choice of each row, token * choices + place, or -1. `ends` int32 (experts,): where each expert's rows end; those
    of the first begin at 0.
    """

    dest_row: Tensor
    source_choice: Tensor
    offsets: Tensor


def moe_routes_eager(experts_of: Tensor, experts: int) -> Routes:
    """Routes for choices of experts, (tokens, choices) of integers from 0 to experts - 1, or -1 for nobody."""
    flat = experts_of.flatten().to(torch.int64)
    chosen = flat.where(flat >= 0, experts)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, chosen, chosen.new_ones(()).expand_as(chosen)
    )
    ends = counts[:experts].cumsum(0)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    used = torch.arange(len(flat), device=flat.device) < (ends[-1] if experts else 0)
    return Routes(
        rows.where(flat >= 0, NOBODY).view(experts_of.shape).to(torch.int32),
        order.where(used, NOBODY).to(torch.int32),
        ends.to(torch.int32),
    )


def moe_permute_eager(x: Tensor, probabilities: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
    """
    Each choice's row, and the probability of each row: x (tokens, width), probabilities (tokens, choices).

    Gives (tokens * choices, width) and (tokens * choices,); rows that nobody needs, which come last, are zero.
    """
    both: tuple[Tensor, Tensor] = _Permute.apply(x, probabilities, *routes)  # type: ignore[no-untyped-call]
    return both


def moe_unpermute_eager(rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
    """
    The sum by token of its choices' rows, each times its probability if there are any; summed in at least float32.

    rows (tokens * choices, width), probabilities (tokens, choices); gives (tokens, width), zero without a choice.
    """
    summed: Tensor = _Unpermute.apply(rows, probabilities, *routes)  # type: ignore[no-untyped-call]
    return summed


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probabilities: Tensor, of_choices: Tensor, choices: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(of_choices)
        per_token = max(of_choices.shape[1], 1)
        needed = choices >= 0
        token = (choices // per_token).where(needed, 0).to(torch.int64)
        flat = probabilities.flatten()[choices.where(needed, 0).to(torch.int64)]
        return x[token].where(needed.unsqueeze(-1), 0), flat.where(needed, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> tuple[Tensor | None, ...]:
        (of_choices,) = ctx.saved_tensors
        known = of_choices >= 0
        summed = _gathered(grad, of_choices).sum(1).to(grad.dtype)
        of_probabilities = grad_probabilities[of_choices.where(known, 0).to(torch.int64)].where(known, 0)
        return summed, of_probabilities, None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probabilities: Tensor | None, of_choices: Tensor, choices: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, probabilities, of_choices, choices)
        gathered = _gathered(rows, of_choices)
        weighted = gathered if probabilities is None else gathered * probabilities.unsqueeze(-1)
        return own(weighted.sum(1).to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probabilities, of_choices, choices = ctx.saved_tensors
        needed, place = choices >= 0, choices.where(choices >= 0, 0).to(torch.int64)
        of_rows = grad[place // max(of_choices.shape[1], 1)].where(needed.unsqueeze(-1), 0)
        if probabilities is not None:
            of_rows = (_accumulation_dtype(of_rows) * probabilities.flatten()[place].unsqueeze(-1)).to(grad.dtype)
        of_probabilities = None
        if rows is not None:
            of_probabilities = (_gathered(rows, of_choices) * grad.unsqueeze(1)).sum(-1).to(probabilities.dtype)
        return of_rows, of_probabilities, None, None, None


def _gathered(rows: Tensor, of_choices: Tensor) -> Tensor:
    """The row of each choice (tokens, choices, width) in at least float32, zero where there is none."""
    known = of_choices >= 0
    return _accumulation_dtype(rows[of_choices.where(known, 0).to(torch.int64)]).where(known.unsqueeze(-1), 0)


def _accumulation_dtype(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def indices_to_multihot_eager(experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """
    Which experts each token has chosen, and with what probability: bool and (tokens, experts).

    experts_of (tokens, choices) of integers from 0 to experts - 1, or -1 for nobody; probabilities (tokens, choices),
    of which those of an expert that a token chooses twice add up.
    """
    known = experts_of >= 0
    place = experts_of.where(known, 0).to(torch.int64)
    shape = len(experts_of), experts
    chosen = torch.zeros(shape, dtype=torch.int32, device=place.device).scatter_add_(1, place, known.to(torch.int32))
    spread = probabilities.new_zeros(shape).scatter_add(1, place, probabilities.where(known, 0))
    return chosen > 0, spread
