"""Attention with normed values, which may be the keys (Gemma 4)."""

import torch
from torch import Tensor

from drawloom.components.model.decoder.attention import Attention
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mixer_specs import NormedValueSpec
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.ports import Kernels


class NormedValueAttention(Attention):
    """Attention whose values are normed by head, without a weight."""

    spec: NormedValueSpec

    def __init__(self, architecture: DecoderConfig, spec: NormedValueSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        if spec.keys_as_values:
            del self.v_proj

    def project_qkv(self, hidden: Tensor) -> tuple[Tensor, ...]:
        if not self.spec.keys_as_values:
            return super().project_qkv(hidden)
        q, k = self.q_proj(hidden), self.k_proj(hidden)
        return q, k, k

    def norm_and_rotate(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        ones = v.new_ones(self.spec.head_dim, dtype=torch.promote_types(v.dtype, torch.float32))
        return super().norm_and_rotate(q, k, self.kernels.rms_norm(v, ones, self.q_norm.eps), context)
