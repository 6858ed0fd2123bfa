"""
Where each token's copies go: sorted by expert, and by token within an expert.

Everything stays on the device and has sizes that the host knows: there is a row for every choice of every token, and
rows that nobody needs, for choices of no expert, come last.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
