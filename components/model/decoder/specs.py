"""Specifications for common parts in layers, attention and feed-forward networks, and a layer's context."""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import attrs
from torch import Tensor, nn

from drawloom.ports import PLAIN_ATTENTION, AttentionOptions, Kernels

if TYPE_CHECKING:
    from drawloom.kernels.rope.frequencies import Scaling


@attrs.frozen
class Rope:
    """
    A layer's rotary positions: a head's first `dim` channels are rotated.

    Channel i is paired with channel i + dim // 2, or, if `interleaved`, channel 2 i with 2 i + 1.
    """

    dim: int
    base: float
    scaling: "Scaling" = None
    interleaved: bool = False

    def compute_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 (rows, length, dim // 2), for integer positions (rows, length)."""
        from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin  # a check computes no angles

        return compute_rope_cos_and_sin(positions, self.dim, self.base, self.scaling)


class PartSpec:
    """Specification of a layer's part."""

    part: str
    """The module's class, imported when a layer has such a part."""

    is_linked: bool = False
    """Whether the part reads earlier layers' tensors."""

    @classmethod
    def from_config(cls, config: Any, **values: Any) -> Self:
        """Return a specification with these values; other fields are the config's attributes with their names."""
        kind: Any = cls
        names = {field.name for field in attrs.fields(kind)} - values.keys()
        return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)}, **values)

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

    num_attention_heads: int
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

    `qk_norm` norms queries and keys (RMSNorm), by head or over the whole projection. With `attention_sinks`, every head
    has a learned score for one more key, whose value is 0. With an `attention_gate`, the output is multiplied by the
    sigmoid of a projection. With `keys_as_values`, the projected keys, before norm and rotation, are the values, too.
    Keys and values may stay for later layers under the name `link`; if `is_linked`, they are an earlier layer's.
    """

    num_key_value_heads: int
    head_dim: int
    attention_sinks: bool = False
    attention_gate: bool = False
    keys_as_values: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    part: str = "layer:Attention"
    is_linked: bool = False
    link: str = ""

    @property
    def pair_flops(self) -> int:
        return 4 * self.num_attention_heads * self.head_dim


@attrs.frozen(kw_only=True)
class RecurrentSpec(PartSpec):
    """Specification of a part that takes states over the tokens in a document, such as its last `taps` tokens."""

    taps: int

    @property
    def token_flops(self) -> int:
        """FLOPs for a token, beside products with parameters."""
        return 0


@attrs.frozen
class SwiGlu:
    """
    The activation silu(gate) * up in a feed-forward network or experts.

    `inner_projections` are the linear layers before it; experts join them in one matrix, `expert_matrix`.
    """

    inner_projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    expert_matrix: ClassVar[str] = "gate_up_proj"

    def apply(self, kernels: Kernels, products: Sequence[Tensor]) -> Tensor:
        """Return (..., width) for the inner projections' products, each (..., width)."""
        return kernels.swiglu(products[0], products[1])

    def apply_and_scale(self, kernels: Kernels, rows: Tensor, scale: Tensor) -> Tensor:
        """Return (rows, width), times scale (rows,), for experts' joined products (rows, projections * width)."""
        return kernels.swiglu_halves(rows, scale)


@attrs.frozen(kw_only=True)
class MlpSpec(PartSpec):
    """Specification of a gated feed-forward network: its inner width and its activation."""

    part = "layer:GatedMlp"

    width: int
    activation: SwiGlu = SwiGlu()


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
