"""Specifications of the parts of a layer. A config chooses them; the modules are built from them."""

from typing import Literal

import attrs

from drawloom.components.model.decoder.rope import Rope
from drawloom.components.model.decoder.router import Routing
from drawloom.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions

Activation = Literal["silu", "gelu_tanh"]
"""Activation of the gate in a feed-forward network; `gelu_tanh` is the tanh approximation of GELU."""


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """
    Specification of causal self-attention.

    `rope` rotates queries and keys; None: they are not rotated. A token attends to the last `window` tokens, itself
    included; None: to all before it. `qk_norm` is RMSNorm of queries and keys, by head or over the whole projection.
    `options` are those of the kernels: the scale and the cap of scores.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qk_norm: Literal["none", "head", "projection"] = "none"
    options: AttentionOptions = PLAIN_ATTENTION

    @property
    def pair_flops(self) -> int:
        """FLOPs for a query and a key: a product with the key, and one with the value."""
        return 4 * self.heads * self.head_dim


@attrs.frozen(kw_only=True)
class MlpSpec:
    """Specification of a gated feed-forward network: its inner width and the activation of its gate."""

    width: int
    activation: Activation = "silu"


@attrs.frozen(kw_only=True)
class ExpertSpec:
    """
    Specification of a router and its experts of inner width `width`, each.

    `shared_width` is the inner width of a feed-forward network that all tokens visit beside their experts; 0: there is
    none. Loss coefficients are those of one layer.
    """

    experts: int
    choices: int
    width: int
    routing: Routing
    shared_width: int = 0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


PartSpec = AttentionSpec | MlpSpec | ExpertSpec


@attrs.frozen
class Branch:
    """
    A branch of a layer: the module `name`, whose output is added to the residual stream.

    The norm called `norm_before` is applied to the module's input, and `norm_after` to its output.
    """

    norm_before: str | None
    name: str
    spec: PartSpec
    norm_after: str | None = None
