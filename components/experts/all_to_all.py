"""
The component `experts.all_to_all`: expert parallelism by all-to-all collectives.

A rank sends a token, with its probabilities, once to every rank with some of its experts. The receiving rank copies the
token to a row for every expert and sums the experts' results before it sends them back. Experts have no capacity: no
token is dropped, and the result equals one rank's result. The backward pass exchanges gradients in the opposite
direction.
"""

from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom import component
from drawloom.components.experts.planned_exchange import dispatch_if_one_rank_or_meta
from drawloom.ports import Dispatched, Group, Kernels, Mesh, Routes


@component(impact="safe")
class AllToAllExperts:
    """
    Dispatcher for experts partitioned along `mesh.expert`, with any backend's all-to-all collectives.

    The host waits once per layer, for the token counts.
    """

    supports_expert_parallel: ClassVar[bool] = True

    kernels: Kernels
    mesh: Mesh

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Send tokens to their experts' ranks, and return rows for this rank's experts.

        hidden is (tokens, width), chosen and probabilities (tokens, choices).
        """
        group = self.mesh.expert_group
        local_experts = num_experts // group.size
        dispatched = dispatch_if_one_rank_or_meta(
            self.kernels, hidden, chosen, probabilities, experts=local_experts, ranks=group.size
        )
        if dispatched is not None:
            return dispatched
        routes = self._route_to_ranks(chosen, local_experts, group)
        tokens, weights = self._exchange_tokens_and_probabilities(hidden, probabilities, routes)
        to_experts = self._route_to_experts(chosen, local_experts, routes)
        rows, scale = self.kernels.moe_permute(tokens, weights, to_experts)
        return Dispatched(rows, scale, to_experts.offsets, partial(self._sum_returned_by_token, routes, to_experts))

    def _route_to_ranks(self, chosen: Tensor, local_experts: int, group: Group) -> "TokenRoutes":
        """Return the routes for tokens with chosen experts int64 (tokens, choices), if ranks have `local_experts`."""
        rank = chosen.div(local_experts, rounding_mode="floor")  # -1 for a dropped choice
        to_ranks = self.kernels.moe_routes(_deduplicate_ranks(rank, group.size), group.size)
        tokens = to_ranks.offsets.diff(prepend=to_ranks.offsets.new_zeros(1))
        counts = torch.stack([tokens.to(torch.int64), _count_choices_by_rank(rank, group.size)], 1)
        received_counts = group.all_to_all(counts, [1] * group.size, [1] * group.size)
        columns = [counts[:, 0], received_counts[:, 0], received_counts[:, 1]]
        sent, received, rows = torch.cat(columns).view(3, -1).tolist()
        return TokenRoutes(group, sent, received, sum(rows), _drop_unused_rows(to_ranks, sum(sent)))

    def _exchange_tokens_and_probabilities(
        self, hidden: Tensor, probabilities: Tensor, routes: "TokenRoutes"
    ) -> tuple[Tensor, Tensor]:
        """Send tokens, and return the received tokens (tokens, width) and probabilities (tokens, choices)."""
        unused = probabilities.new_zeros(routes.to_ranks.dest_row.shape)
        both = (self.kernels.moe_permute(tensor, unused, routes.to_ranks).rows for tensor in (hidden, probabilities))
        exchanged: tuple[Tensor, Tensor] = _Exchange.apply(routes.group, routes.sent, routes.received, *both)  # type: ignore[no-untyped-call]
        return exchanged

    def _route_to_experts(self, chosen: Tensor, local_experts: int, routes: "TokenRoutes") -> Routes:
        """Return the routes from received tokens to this rank's experts, without choices for other ranks' experts."""
        dest, source, _ = routes.to_ranks
        # A source choice is token * choices + the choice's index; here a token's choices are its ranks.
        choices = chosen[source // max(dest.shape[1], 1)].to(torch.int32)
        first_expert = routes.group.rank * local_experts
        local = routes.group.all_to_all(choices, routes.sent, routes.received) - first_expert
        local = local.where((local >= 0) & (local < local_experts), -1)
        return _drop_unused_rows(self.kernels.moe_routes(local, local_experts), routes.rows)

    def _sum_returned_by_token(self, routes: "TokenRoutes", to_experts: Routes, results: Tensor) -> Tensor:
        """Sum the experts' results (rows, width) by token, on the tokens' ranks: (tokens, width)."""
        summed = self.kernels.moe_unpermute(results, to_experts)
        (back,) = _Exchange.apply(routes.group, routes.received, routes.sent, summed)  # type: ignore[no-untyped-call]
        return self.kernels.moe_unpermute(back, routes.to_ranks)


@attrs.frozen(eq=False)
class TokenRoutes:
    """
    Routes from this rank's tokens to a group's ranks.

    `sent` and `received` are token counts by rank; `rows` is the row count for the received tokens.
    """

    group: Group
    sent: list[int]
    received: list[int]
    rows: int
    to_ranks: Routes


def _deduplicate_ranks(rank: Tensor, ranks: int) -> Tensor:
    """
    Return every token's destination ranks without repetitions, padded with -1: (tokens, choices) to (tokens, up to
    choices).
    """
    is_chosen = torch.zeros(len(rank), ranks + 1, dtype=torch.int32, device=rank.device)
    is_chosen.scatter_(1, rank + 1, 1)
    values, indices = is_chosen[:, 1:].topk(min(rank.shape[1], ranks))
    return indices.where(values > 0, -1)


def _count_choices_by_rank(rank: Tensor, ranks: int) -> Tensor:
    """Count the choices (tokens, choices) by rank: int64 (ranks,)."""
    flat = rank.flatten() + 1
    return flat.new_zeros(ranks + 1).scatter_add_(0, flat, torch.ones_like(flat))[1:]


def _drop_unused_rows(routes: Routes, rows: int) -> Routes:
    """Return the routes with the first `rows` rows; dropped choices leave the rows behind them unused."""
    return routes._replace(source_choice=routes.source_choice[:rows])


class _Exchange(Function):
    """All-to-all for tensors (rows, ...) with the same splits; the backward pass exchanges their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, sent: list[int], received: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send tensors (sent, ...) and return the received ones (received, ...)."""
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return tuple(group.all_to_all(tensor, sent, received) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.needs_input_grad[3:], grads, strict=True)
        back = (ctx.group.all_to_all(grad, ctx.received, ctx.sent) if needs else None for needs, grad in needed)
        return None, None, None, *back
