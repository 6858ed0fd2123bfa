"""The component `experts.local`: experts without expert parallelism."""

from functools import partial

from torch import Tensor

from drawloom import component
from drawloom.ports import Dispatched, Kernels


@component(impact="safe")
class LocalExperts:
    """Dispatcher for ranks with all their layers' experts. Tokens stay on their rank. The stages' default."""

    kernels: Kernels

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """Copy hidden (tokens, width) to rows (tokens * choices, width)."""
        routes = self.kernels.moe_routes(chosen, num_experts)
        rows, scale = self.kernels.moe_permute(hidden, probabilities, routes)
        return Dispatched(rows, scale, routes.offsets, partial(self.kernels.moe_unpermute, routes=routes))
