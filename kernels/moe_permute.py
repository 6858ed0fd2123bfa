"""Tokens copied to the rows of their experts, and what the experts made of them added up by token again."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.moe_routes import Routes


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
        weighted = ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if weighted else None, probabilities, of_choices, choices)
        gathered = _gathered(rows, of_choices)
        return (gathered if probabilities is None else gathered * probabilities.unsqueeze(-1)).sum(1).to(rows.dtype)

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
