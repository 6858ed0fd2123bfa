"""
The component `experts.all_to_all`.

Ranks exchange how many tokens they have for each other's experts, then the tokens themselves; there is no capacity, so
that none is dropped and the result is that of one rank. The backward pass exchanges gradients the other way round.
"""

from functools import partial
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.local import LocalExperts
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.model import Dispatched, ExpertKernels
from drawloom.graph import component


@component(impact="safe")
class AllToAllExperts:
    """
    Ranks along `mesh.expert` share the experts of a layer out, and send tokens by all-to-all collectives.

    Works on every backend. The host waits once in each layer, for the numbers of tokens.
    """

    between_ranks: ClassVar[bool] = True

    kernels: ExpertKernels
    mesh: Mesh

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Rows for the experts of this rank, from all ranks: hidden (tokens, width), chosen and probabilities (tokens,
        choices).
        """
        group = self.mesh.group("expert")
        here = LocalExperts(kernels=self.kernels)
        sorted_rows = here.dispatch(hidden, chosen, probabilities, num_experts)
        if group.size == 1:
            return sorted_rows
        mine = num_experts // group.size
        if hidden.is_meta:  # shapes are right with any number of rows
            return sorted_rows._replace(ends=sorted_rows.ends[:mine])
        route = _route(sorted_rows.ends, group)
        rows, scale = _send(sorted_rows.rows, sorted_rows.scale, route)
        # From each rank rows come sorted by expert; here they are sorted again, as tokens with one choice.
        received = here.dispatch(rows, route.experts.unsqueeze(1), scale.unsqueeze(1), mine)
        return received._replace(combine=partial(_combine, received, sorted_rows, route))


@attrs.frozen(eq=False)
class Route:
    """How many rows go to each rank of a group and come from it, and the expert here of each that comes, int64."""

    sent: list[int]
    received: list[int]
    experts: Tensor
    group: Group


def _route(ends: Tensor, group: Group) -> Route:
    """The route of rows that are sorted by expert, where each expert's end at `ends`, int32 (experts of all ranks,)."""
    counts = ends.diff(prepend=ends.new_zeros(1)).view(group.size, -1)
    theirs = group.all_to_all(counts, [1] * group.size, [1] * group.size)
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    experts = torch.arange(theirs.shape[1], device=ends.device).repeat(group.size)
    return Route(sent, received, experts.repeat_interleave(theirs.flatten(), output_size=sum(received)), group)


def _send(rows: Tensor, scale: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """Rows (rows, width) and the scale (rows,) of each, from all ranks."""
    total = sum(route.sent)  # those after it are of dropped choices
    sent, received = route.sent, route.received
    exchanged: tuple[Tensor, Tensor] = _Exchange.apply(route.group, sent, received, rows[:total], scale[:total])  # type: ignore[no-untyped-call]
    return exchanged


def _combine(received: Dispatched, sorted_rows: Dispatched, route: Route, results: Tensor) -> Tensor:
    """What experts gave for `received`, (rows, width), back at the ranks of the tokens and summed: (tokens, width)."""
    sent, back = route.received, route.sent
    (rows,) = _Exchange.apply(route.group, sent, back, received.combine(results))  # type: ignore[no-untyped-call]
    return sorted_rows.combine(F.pad(rows, (0, 0, 0, len(sorted_rows.rows) - len(rows))))


class _Exchange(Function):
    """An all-to-all of each of some tensors (rows, ...), split in the same way; backward, of their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, sent: list[int], received: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return tuple(group.all_to_all(tensor, sent, received) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.needs_input_grad[3:], grads, strict=True)
        back = (ctx.group.all_to_all(grad, ctx.received, ctx.sent) if needs else None for needs, grad in needed)
        return None, None, None, *back
