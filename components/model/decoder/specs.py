"""
Specifications of a layer's parts, and the context in which they compute.

Parts are attention, the mixers that few families have in its place, feed-forward networks, and experts with their
activation and router.
"""

from collections import Counter
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, NamedTuple

import attrs
from torch import Tensor, nn

from drawloom.components.model.decoder.rope import Rope
from drawloom.ports import PLAIN_ATTENTION, AttentionOptions, Kernels

Activation = Literal["silu", "gelu_tanh", "relu2"]
"""
Activation of the gate in a feed-forward network; `gelu_tanh` is the tanh approximation of GELU. `relu2`, squared ReLU,
is of networks without a gate.
"""


class PartSpec:
    """Specification of a layer's part."""

    @property
    def part(self) -> str:
        """The module's class, imported when a layer has such a part."""
        raise NotImplementedError

    @property
    def is_linked(self) -> bool:
        """Whether the part reads earlier layers' tensors."""
        return False

    def build(self, architecture: Any, kernels: Kernels) -> nn.Module:
        """Return the module for a decoder's config."""
        part = resolve_name(f"{__package__}.{self.part}")
        return part(architecture, self, kernels)  # type: ignore[no-any-return]


@attrs.frozen(kw_only=True)
class MixerSpec(PartSpec):
    """
    Specification of causal attention.

    `rope` rotates queries and keys; None: they are not rotated. A token attends to the last `window` tokens, itself
    included; None: to all before it. `options` are the kernels': the scale and the cap for scores.
    """

    heads: int
    rope: Rope | None
    window: int | None = None
    options: AttentionOptions = PLAIN_ATTENTION

    @property
    def pair_flops(self) -> int:
        """FLOPs for one query-key pair in all heads: the query times the key, and the weight times the value."""
        raise NotImplementedError

    @property
    def pair_flops_by_window(self) -> Mapping[int | None, int]:
        """FLOPs for one query-key pair, by the number of last keys that a query has pairs with; None: all keys."""
        return {self.window: self.pair_flops}


@attrs.frozen(kw_only=True)
class AttentionSpec(MixerSpec):
    """
    Specification of attention with grouped queries.

    `qk_norm` norms queries and keys (RMSNorm), by head or over the whole projection. With `sinks`, every head has a
    learned score for one more key, whose value is 0. With a `gate`, the output is multiplied by the sigmoid of a
    projection. With `keys_as_values`, the projected keys, before norm and rotation, are the values, too. Keys and
    values may stay for later layers, or be those of an earlier one if `is_linked`, under the name `link`.
    """

    kv_heads: int
    head_dim: int
    sinks: bool = False
    gate: bool = False
    keys_as_values: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    part: str = "attention:Attention"
    is_linked: bool = False
    link: str = ""

    @property
    def pair_flops(self) -> int:
        return 4 * self.heads * self.head_dim


@attrs.frozen(kw_only=True)
class RecurrentSpec(PartSpec):
    """Specification of a part that takes states over the tokens in a document, such as its last `taps` tokens."""

    taps: int

    @property
    def token_flops(self) -> int:
        """FLOPs for a token, beside products with parameters."""
        return 0


@attrs.frozen(kw_only=True)
class MlpSpec(PartSpec):
    """Specification of a gated feed-forward network: its inner width and its gate's activation."""

    width: int
    activation: Activation = "silu"

    @property
    def part(self) -> str:
        return "experts:SquaredReluMlp" if self.activation == "relu2" else "mlp:GatedMlp"


@attrs.frozen
class Branch:
    """
    A layer's branch: the module `name`, whose output is added to the residual stream.

    The norm called `norm_before` is applied to the module's input, and `norm_after` to its output.
    """

    norm_before: str | None
    name: str
    spec: PartSpec
    norm_after: str | None = None


class LayerContext(NamedTuple):
    """
    Inputs of a layer beside hidden states.

    `documents` are int64 (rows, length). `angles` are cos and sin, float32 (rows, length, pairs); None: the layer does
    not rotate. `mask` is the kernels' attention_mask of the microbatch, and `recurrence` their recurrence_mask.
    `weights`, float32 (rows, length), weight each token in losses inside of the layer; None disables them. `padding`,
    bool (rows, length), is true where there is no document's token; None without padding. `links` has tensors from the
    embedding and earlier layers for later ones, by name.
    """

    # A tuple, so that torch's compiler and tree functions see the tensors.
    documents: Tensor
    angles: tuple[Tensor, Tensor] | None = None
    mask: Any = None
    weights: Tensor | None = None
    padding: Tensor | None = None
    recurrence: Any = None
    links: Any = None

    def rotate(self, kernels: Kernels, x: Tensor, interleaved: bool = False) -> Tensor:
        """Rotate channels (rows, length, heads, channels) by token positions, unless the layer does not rotate."""
        if self.angles is None:
            return x
        cos, sin = self.angles
        return kernels.rope(x, cos, sin, interleaved)


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
class NormedRouting(Routing):
    """Routing by normed hidden states, with learned factors; `eps` is the norm's."""

    eps: float
