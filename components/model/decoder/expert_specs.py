"""Specifications for experts, with their activation and router."""

from typing import ClassVar, Literal

import attrs
from torch import Tensor

from drawloom.components.model.decoder.specs import Activation, PartSpec
from drawloom.ports import Kernels


@attrs.frozen
class SwiGlu:
    """
    The experts' activation silu(gate) * up; `parameter` is the matrix before it.

    `in_mlp` is the activation of a feed-forward network beside the experts.
    """

    parameter: ClassVar[str] = "gate_up_proj"
    factors: ClassVar[int] = 2
    in_mlp: ClassVar[Activation] = "silu"

    def apply(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        """Return (rows, width) for products (rows, factors * width), multiplied by scale (rows,)."""
        return kernels.swiglu_halves(rows, scale)


@attrs.frozen
class ClampedSwiGlu(SwiGlu):
    """Slope and bound for clamped SwiGLU, see kernels/gates/eager.py."""

    alpha: float
    limit: float

    def apply(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        return kernels.oss_swiglu_halves(rows, scale, self.alpha, self.limit)


@attrs.frozen
class SquaredRelu(SwiGlu):
    """The experts' activation relu(x) ** 2, without a gate (So et al. 2021, arXiv 2109.08668)."""

    parameter = "up_proj"
    factors = 1
    in_mlp = "relu2"

    def apply(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.relu().square() * scale[:, None]).to(rows.dtype)


@attrs.frozen
class GeGlu(SwiGlu):
    """The experts' activation gelu(gate) * up, with the tanh approximation of GELU."""

    in_mlp = "gelu_tanh"

    def apply(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        gate, up = (part.contiguous() for part in rows.chunk(2, -1))
        return (kernels.geglu(gate, up) * scale[:, None]).to(rows.dtype)


@attrs.frozen(kw_only=True)
class Routing:
    """
    How a token's experts are chosen and weighted.

    Scores are the softmax over all experts, or the sigmoid of each. With `bias` every expert has a number added to its
    scores for the choice alone. With `n_group` groups, a token is sent to experts in the `topk_group` groups whose
    `best_in_group` best scores have the greatest sums. The chosen experts' weights are their scores, with
    `norm_topk_prob` divided by their sum, times `routed_scaling_factor`. A softmax over the chosen experts' logits
    alone, as in Mixtral, is the softmax with `norm_topk_prob`. With `wide_logits` logits are computed in at least
    float32, and with `linear_bias` a learned bias is added to them.
    """

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    best_in_group: int = 2
    wide_logits: bool = False
    linear_bias: bool = False


@attrs.frozen(kw_only=True)
class NormedRouting(Routing):
    """Routing by normed hidden states, with learned factors; `eps` is the norm's."""

    eps: float


@attrs.frozen(kw_only=True)
class ExpertSpec(PartSpec):
    """
    Specification of a router and its experts, with inner width `width`.

    `shared_expert_width` is the inner width of a feed-forward network that all tokens visit beside their experts; 0:
    there is none. With `shared_gate`, its output is multiplied by the sigmoid of a projection. `router` and `shared`
    are module names. With `biases`, experts have biases. Loss coefficients are per layer. Experts map `latent_width`
    channels; None: hidden states.
    """

    experts: int
    choices: int
    width: int
    routing: Routing
    shared_expert_width: int = 0
    shared_gate: bool = False
    router: str = "gate"
    shared: str = "shared_experts"
    biases: bool = False
    activation: SwiGlu = SwiGlu()
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    latent_width: int | None = None
    part: str = "experts:SparseMoeBlock"
