"""Specifications for rare parts in layers: mixers, gates by layer, and hyper-connections."""

from collections import Counter
from collections.abc import Mapping

import attrs

from drawloom.components.model.decoder.specs import Branch, MixerSpec, PartSpec, RecurrentSpec


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
