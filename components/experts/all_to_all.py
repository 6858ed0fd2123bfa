"""
The component `experts.all_to_all`.

A token travels once to each rank that has some of its experts, with its probabilities; there its rows are made, and
what its experts give is added up before it travels back. No capacity limits how many tokens an expert gets, so that
none is dropped and the result is that of one rank. The backward pass exchanges gradients the other way round.
"""

from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.planned_exchange import without_exchange
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.experts import Dispatched, ExpertKernels
from drawloom.graph import component

Routes = tuple[Tensor, Tensor, Tensor]


@component(impact="safe")
class AllToAllExperts:
    """
    Ranks along `mesh.expert` share the experts of a layer out, and send tokens by all-to-all collectives.

    Works on every backend. The host waits once in each layer, for the numbers of tokens.
    """

    supports_expert_parallel: ClassVar[bool] = True

    kernels: ExpertKernels
    mesh: Mesh

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Rows for the experts of this rank, from all ranks: hidden (tokens, width), chosen and probabilities (tokens,
        choices).
        """
        group = self.mesh.expert_group
        mine = num_experts // group.size
        if (found := without_exchange(self.kernels, hidden, chosen, probabilities, mine, group.size)) is not None:
            return found
        journey = self._journey(chosen, mine, group)
        tokens, weights = self._sent(hidden, probabilities, journey)
        here = self._at_experts(chosen, mine, journey)
        rows, scale = self.kernels.moe_permute(tokens, weights, here)
        return Dispatched(rows, scale, here[2], partial(self._combine, journey, here))

    def _journey(self, chosen: Tensor, mine: int, group: Group) -> "TokenRoutes":
        """Where tokens go, by what they have chosen, int64 (tokens, choices), of ranks with `mine` experts each."""
        rank = chosen.div(mine, rounding_mode="floor")  # of a dropped choice -1
        outward = self.kernels.moe_routes(_once(rank, group.size), group.size)
        tokens = outward[2].diff(prepend=outward[2].new_zeros(1))
        counts = torch.stack([tokens.to(torch.int64), _count(rank, group.size)], 1)
        theirs = group.all_to_all(counts, [1] * group.size, [1] * group.size)
        sent, received, rows = torch.cat([counts[:, 0], theirs[:, 0], theirs[:, 1]]).view(3, -1).tolist()
        return TokenRoutes(group, sent, received, sum(rows), _cut(outward, sum(sent)))

    def _sent(self, hidden: Tensor, probabilities: Tensor, journey: "TokenRoutes") -> tuple[Tensor, Tensor]:
        """The tokens (tokens, width) that are here after the journey, and their probabilities (tokens, choices)."""
        unused = probabilities.new_zeros(journey.outward[0].shape)
        both = (self.kernels.moe_permute(each, unused, journey.outward)[0] for each in (hidden, probabilities))
        exchanged: tuple[Tensor, Tensor] = _Exchange.apply(journey.group, journey.sent, journey.received, *both)  # type: ignore[no-untyped-call]
        return exchanged

    def _at_experts(self, chosen: Tensor, mine: int, journey: "TokenRoutes") -> Routes:
        """The routes to the experts of this rank from the tokens that are here; other choices of theirs are dropped."""
        dest, source, _ = journey.outward
        theirs = chosen[source // max(dest.shape[1], 1)].to(torch.int32)
        local = journey.group.all_to_all(theirs, journey.sent, journey.received) - journey.group.rank * mine
        return _cut(self.kernels.moe_routes(local.where((local >= 0) & (local < mine), -1), mine), journey.rows)

    def _combine(self, journey: "TokenRoutes", here: Routes, results: Tensor) -> Tensor:
        """What experts gave for rows, (rows, width), summed by token at the tokens' ranks: (tokens, width)."""
        summed = self.kernels.moe_unpermute(results, here)
        (back,) = _Exchange.apply(journey.group, journey.received, journey.sent, summed)  # type: ignore[no-untyped-call]
        return self.kernels.moe_unpermute(back, journey.outward)


@attrs.frozen(eq=False)
class TokenRoutes:
    """
    How many tokens go to each rank of a group and come from it, how many rows these make here, and the routes of this
    rank's tokens to ranks.
    """

    group: Group
    sent: list[int]
    received: list[int]
    rows: int
    outward: Routes


def _once(rank: Tensor, ranks: int) -> Tensor:
    """The ranks (tokens, choices) of a token, each once: (tokens, at most as many), -1 behind them."""
    reached = torch.zeros(len(rank), ranks + 1, dtype=torch.int32, device=rank.device)
    reached.scatter_(1, rank + 1, 1)
    found, place = reached[:, 1:].topk(min(rank.shape[1], ranks))
    return place.where(found > 0, -1)


def _count(rank: Tensor, ranks: int) -> Tensor:
    """How many choices (tokens, choices) fell on each rank, int64 (ranks,)."""
    flat = rank.flatten() + 1
    return flat.new_zeros(ranks + 1).scatter_add_(0, flat, torch.ones_like(flat))[1:]


def _cut(routes: Routes, rows: int) -> Routes:
    """Routes without the places of dropped choices, of which there are many."""
    dest, source, ends = routes
    return dest, source[:rows], ends


class _Exchange(Function):
    """An all-to-all of each of some tensors (rows, ...), split in the same way; backward, of their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, sent: list[int], received: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows that come, (received, ...), of tensors (sent, ...)."""
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return tuple(group.all_to_all(tensor, sent, received) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.needs_input_grad[3:], grads, strict=True)
        back = (ctx.group.all_to_all(grad, ctx.received, ctx.sent) if needs else None for needs, grad in needed)
        return None, None, None, *back
