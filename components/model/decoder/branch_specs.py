"""Specifications for rare parts in layers: mixers, gates by layer, hyper-connections, and experts with routers."""

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs
from torch import Tensor

from drawloom.components.model.decoder.specs import Activation, Branch, MixerSpec, PartSpec, RecurrentSpec
from drawloom.ports import Kernels


@attrs.frozen(kw_only=True)
class PerLayerInputSpec(PartSpec):
    """Specification for a gate on the embedding's `width` channels for the layer `number`."""

    part = "gemma4:PerLayerInput"
    is_linked = True

    width: int
    number: int


@attrs.frozen(kw_only=True)
class LatentSpec(MixerSpec):
    """
    Specification of multi-head latent attention.

    A query or key head has `nope_dim` channels, and `rope_dim` rotated channels, shared by all heads in keys. Keys and
    values are projected from a latent with `kv_rank` channels, queries from one with `query_rank`; None: from hidden
    states.
    """

    part = "latent:LatentAttention"

    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    query_rank: int | None

    @property
    def pair_flops(self) -> int:
        return 2 * self.heads * (self.nope_dim + self.rope_dim + self.v_dim)


@attrs.frozen(kw_only=True)
class SparseLatentSpec(LatentSpec):
    """
    Specification of latent attention to the `chosen` tokens with the best scores by an indexer; None: to all tokens.

    The indexer has `index_heads` queries and a key, both `index_dim` wide; with `index_interleaved`, pairs of adjacent
    channels are rotated. `loss_coef` is for its loss in this layer. The choice stays for later layers as `link`.
    """

    part = "latent:SparseLatentAttention"

    query_rank: int
    chosen: int | None
    index_heads: int
    index_dim: int
    loss_coef: float
    index_interleaved: bool = False
    link: str = ""

    @property
    def pair_flops_by_window(self) -> Mapping[int | None, int]:
        index_flops = Counter({None: 2 * self.index_heads * self.index_dim})
        return index_flops + Counter({self.chosen: self.pair_flops})


@attrs.frozen(kw_only=True)
class SharedIndexSpec(LatentSpec):
    """Specification for latent attention to an earlier indexer's choice, named `link`, of `chosen` tokens or all."""

    part = "latent:SharedIndexAttention"
    is_linked = True

    chosen: int | None
    link: str

    @property
    def pair_flops_by_window(self) -> Mapping[int | None, int]:
        return {self.chosen: self.pair_flops}


@attrs.frozen(kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """Specification of a gated short convolution over `taps` tokens."""

    part = "recurrent:ShortConvolution"


@attrs.frozen(kw_only=True)
class DeltaSpec(RecurrentSpec):
    """
    Specification of a gated delta net: heads and their widths, and the convolutions' length in tokens.

    Values are written with a strength from 0 to `max_strength`. `norm_eps` is the output norm's; None: the config's.
    With `draws_time_steps` the initial decays are drawn for times from 10 to 1000 tokens.
    """

    part = "recurrent:GatedDeltaNet"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    max_strength: float = 1.0
    norm_eps: float | None = None
    draws_time_steps: bool = False

    @property
    def head_widths(self) -> tuple[tuple[str, int], ...]:
        """Head widths for queries, keys and values."""
        return (("q", self.key_dim), ("k", self.key_dim), ("v", self.value_dim))

    @property
    def channels(self) -> list[int]:
        """Channels of all heads' queries, keys and values."""
        return [self.key_heads * self.key_dim] * 2 + [self.value_heads * self.value_dim]

    @property
    def token_flops(self) -> int:
        """FLOPs for a token: states times key and query, and key times value (an outer product)."""
        return 6 * self.value_heads * self.key_dim * self.value_dim


@attrs.frozen(kw_only=True)
class ChannelDeltaSpec(DeltaSpec):
    """Specification of Kimi Delta Attention: decays by key channel and gates are projected from `rank` channels."""

    part = "recurrent:ChannelDeltaNet"

    rank: int


@attrs.frozen(kw_only=True)
class StateSpaceSpec(DeltaSpec):
    """
    Specification of Mamba-2's mixer: `key_dim` is the state's width, and value heads share a group's B and C as key
    head.

    Time steps are at least `min_time_step`. With `conv_bias`, convolutions have biases.
    """

    part = "recurrent:StateSpaceMixer"

    draws_time_steps: bool = True
    min_time_step: float = 0.0
    conv_bias: bool = False

    @property
    def token_flops(self) -> int:
        return 4 * self.value_heads * self.key_dim * self.value_dim


@attrs.frozen(kw_only=True)
class ConnectionSpec(PartSpec):
    """Specification of a branch's hyper-connection to `streams` residual streams; it begins to read stream `first`."""

    part = "hyper_connections:HyperConnection"

    streams: int
    first: int


@attrs.frozen(kw_only=True)
class ConstrainedSpec(ConnectionSpec):
    """Specification of a manifold-constrained hyper-connection (mHC)."""

    part = "hyper_connections:ConstrainedConnection"


@attrs.frozen(kw_only=True)
class ConnectedBranch(Branch):
    """A layer's branch, with its connection to the residual streams."""

    connection: ConnectionSpec


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
