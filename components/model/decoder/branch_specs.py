"""Specifications for rare parts in layers: mixers, gates by layer, hyper-connections, and experts with routers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
from torch import Tensor

from drawloom.components.model.decoder.specs import Branch, MixerSpec, PartSpec, RecurrentSpec, SwiGlu
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

    A query or key head has `qk_nope_head_dim` channels, and `rope_dim` rotated channels, shared by all heads in keys.
    Keys and values are projected from a latent with `kv_lora_rank` channels, queries from one with `q_lora_rank`; 0:
    from hidden states.
    """

    part = "latent:LatentAttention"

    rope_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int

    @property
    def pair_flops(self) -> int:
        return 2 * self.num_attention_heads * (self.qk_nope_head_dim + self.rope_dim + self.v_head_dim)


@attrs.frozen(kw_only=True)
class SparseLatentSpec(LatentSpec):
    """
    Specification of latent attention to the `chosen` tokens with the best scores by an indexer; None: to all tokens.

    The indexer has `index_n_heads` queries and a key, both `index_head_dim` wide; with `index_interleaved`, pairs of
    adjacent channels are rotated. `loss_coef` is for its loss in this layer. The choice stays for later layers as
    `link`.
    """

    part = "latent:SparseLatentAttention"

    chosen: int | None
    index_n_heads: int
    index_head_dim: int
    loss_coef: float
    index_interleaved: bool = False
    link: str = ""

    @property
    def pair_flops_by_window(self) -> Mapping[int | None, int]:
        index_flops = Counter({None: 2 * self.index_n_heads * self.index_head_dim})
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

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    max_strength: float = 1.0
    norm_eps: float | None = None
    draws_time_steps: bool = False

    @property
    def head_widths(self) -> tuple[tuple[str, int], ...]:
        """Head widths for queries, keys and values."""
        return (("q", self.linear_key_head_dim), ("k", self.linear_key_head_dim), ("v", self.linear_value_head_dim))

    @property
    def value_channels(self) -> int:
        """All heads' value channels."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def token_flops(self) -> int:
        """FLOPs for a token: states times key and query, and key times value (an outer product)."""
        return 6 * self.value_channels * self.linear_key_head_dim


@attrs.frozen(kw_only=True)
class ChannelDeltaSpec(DeltaSpec):
    """Specification of Kimi Delta Attention: decays by key channel and gates are projected from `rank` channels."""

    part = "recurrent:ChannelDeltaNet"

    rank: int


@attrs.frozen(kw_only=True)
class StateSpaceSpec(DeltaSpec):
    """
    Specification of Mamba-2's mixer: `linear_key_head_dim` is the state's width, and value heads share a group's B and
    C as key head.

    Time steps are at least `min_time_step`. With `conv_bias`, convolutions have biases.
    """

    part = "recurrent:StateSpaceMixer"

    draws_time_steps: bool = True
    min_time_step: float = 0.0
    conv_bias: bool = False

    @property
    def token_flops(self) -> int:
        return 4 * self.value_channels * self.linear_key_head_dim


@attrs.frozen(kw_only=True)
class ConnectionSpec(PartSpec):
    """
    Specification of a branch's hyper-connection to `streams` residual streams; it begins to read stream `first`.

    It is manifold-constrained (mHC) if `is_constrained`.
    """

    part = "hyper_connections:HyperConnection"

    streams: int
    first: int
    is_constrained: bool = False


@attrs.frozen(kw_only=True)
class ConnectedBranch(Branch):
    """A layer's branch, with its connection to the residual streams."""

    connection: ConnectionSpec


@attrs.frozen
class ClampedSwiGlu(SwiGlu):
    """Slope and bound for the experts' clamped SwiGLU, see kernels/gates/eager.py."""

    alpha: float
    limit: float

    def apply_and_scale(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        return kernels.oss_swiglu_halves(rows, scale, self.alpha, self.limit)


class GeGlu(SwiGlu):
    """The activation gelu(gate) * up, with the tanh approximation of GELU."""

    def apply(self, kernels: Kernels, products: Sequence[Tensor]) -> Tensor:
        return kernels.geglu(products[0], products[1])

    def apply_and_scale(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        products = [part.contiguous() for part in rows.chunk(len(self.inner_projections), -1)]
        return (self.apply(kernels, products) * scale[:, None]).to(rows.dtype)


class SquaredRelu(GeGlu):
    """The activation relu(x) ** 2, without a gate (So et al. 2021, arXiv 2109.08668)."""

    inner_projections = ("up_proj",)
    expert_matrix = "up_proj"

    def apply(self, kernels: Kernels, products: Sequence[Tensor]) -> Tensor:
        return products[0].relu().square()


@attrs.frozen(kw_only=True)
class ExpertSpec(PartSpec):
    """
    Specification of a router and its experts, with inner width `width`.

    Scores are the softmax over all experts, or the sigmoid of each. With `balancing_bias` every expert has a number
    added to its scores for the choice alone. With `n_group` groups, a token is sent to experts in the `topk_group`
    groups whose `best_in_group` best scores have the greatest sums. The chosen experts' weights are their scores, with
    `norm_topk_prob` divided by their sum, times `routed_scaling_factor`. A softmax over the chosen experts' logits
    alone, as in Mixtral, is the softmax with `norm_topk_prob`. With `wide_logits` logits are computed in at least
    float32, and with `router_bias` a learned bias is added to them.

    `shared_expert_width` is the inner width of a feed-forward network that all tokens visit beside their experts; 0:
    there is none. With `shared_expert_gate`, its output is multiplied by the sigmoid of a projection. Router and shared
    experts are the modules `router_name` and `shared_name`. With `expert_biases`, experts have biases. Loss
    coefficients are per layer. Experts map `moe_latent_size` channels; None: hidden states. `rms_norm_eps` is for norms
    in routers.
    """

    num_experts: int
    num_experts_per_tok: int
    width: int
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    balancing_bias: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    best_in_group: int = 2
    wide_logits: bool = False
    router_bias: bool = False
    shared_expert_width: int = 0
    shared_expert_gate: bool = False
    router_name: str = "gate"
    shared_name: str = "shared_experts"
    expert_biases: bool = False
    activation: SwiGlu = SwiGlu()
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    moe_latent_size: int | None = None
    rms_norm_eps: float = 1e-6
    part: str = "experts:SparseMoeBlock"
