"""Operations, each in the implementation that suits the device best, or in the one that the recipe names."""

from typing import Literal

from torch import Tensor

from drawloom.components.ports.data import IGNORED
from drawloom.graph import component, setting
from drawloom.kernels.attention import attention_eager
from drawloom.kernels.embedding import embedding_eager
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.linear_cross_entropy import linear_cross_entropy_eager
from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.rope import rope_eager
from drawloom.kernels.swiglu import swiglu_eager

Choice = Literal["auto", "eager"]

LINEAR = {"auto": linear_eager, "eager": linear_eager}
EMBEDDING = {"auto": embedding_eager, "eager": embedding_eager}
RMS_NORM = {"auto": rms_norm_eager, "eager": rms_norm_eager}
SWIGLU = {"auto": swiglu_eager, "eager": swiglu_eager}
ROPE = {"auto": rope_eager, "eager": rope_eager}
ATTENTION = {"auto": attention_eager, "eager": attention_eager}
LINEAR_CROSS_ENTROPY = {"auto": linear_cross_entropy_eager, "eager": linear_cross_entropy_eager}


@component
class AutoKernels:
    """The operations that a model computes with: `eager` is plain torch, `auto` the best for the device."""

    _linear: Choice = setting(default="auto", alias="linear", doc="implementation of linear layers")
    _embedding: Choice = setting(default="auto", alias="embedding", doc="implementation of the embedding of tokens")
    _rms_norm: Choice = setting(default="auto", alias="rms_norm", doc="implementation of RMSNorm")
    _swiglu: Choice = setting(default="auto", alias="swiglu", doc="implementation of silu(gate) * up")
    _rope: Choice = setting(default="auto", alias="rope", doc="implementation of the rotary position embedding")
    _attention: Choice = setting(default="auto", alias="attention", doc="implementation of attention")
    _linear_cross_entropy: Choice = setting(
        default="auto", alias="linear_cross_entropy", doc="implementation of the loss over the vocabulary"
    )

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return LINEAR[self._linear](x, weight)

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return EMBEDDING[self._embedding](tokens, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return RMS_NORM[self._rms_norm](x, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return SWIGLU[self._swiglu](gate, up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ROPE[self._rope](x, cos, sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        return ATTENTION[self._attention](q, k, v, documents)

    def linear_cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return LINEAR_CROSS_ENTROPY[self._linear_cross_entropy](hidden, weight, targets, IGNORED)
