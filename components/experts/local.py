"""The component `experts.local`."""

from functools import partial

from torch import Tensor

from drawloom.components.ports.experts import Dispatched, ExpertKernels
from drawloom.graph import component


@component(impact="safe")
class LocalExperts:
    """Every rank has all experts of its layers, and tokens stay on their rank; the way that stages take by default."""

    kernels: ExpertKernels

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """Rows (tokens * choices, width) of hidden (tokens, width), by chosen and probabilities (tokens, choices)."""
        routes = self.kernels.moe_routes(chosen, num_experts)
        rows, scale = self.kernels.moe_permute(hidden, probabilities, routes)
        return Dispatched(rows, scale, routes[2], partial(self.kernels.moe_unpermute, routes=routes))
