"""Layers that compute with the recipe's kernels: linear, RMSNorm, embedding, and a loss's head."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drawloom.components.parallel.tensor_ranks import ALONE, SplitDim, TensorParallel, TensorRanks
from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order
from drawloom.ports import (
    BIAS_ROLE,
    IGNORE_INDEX,
    MATRIX_ROLE,
    RESIDUAL_BIAS_ROLE,
    RESIDUAL_ROLE,
    TABLE_ROLE,
    Head,
    HeadLayer,
    Kernels,
    LinearLayer,
    Role,
    TokenLosses,
)

Style = Literal["colwise", "rowwise", "whole"]

VOCABULARY = SplitDim(0, uneven=True)
"""Split of a table's rows among ranks; cross entropy and lookups accept parts of any size."""


class Linear(nn.Linear, TensorParallel, HeadLayer, LinearLayer):
    """
    Linear layer x @ weight.T + bias with weight (outputs, inputs) and an optional bias (outputs,).

    `style` is the tensor-parallel style of torch and transformers: `colwise` splits the outputs, `rowwise` the inputs,
    in units of `unit` channels; a `whole` layer is not split, and every rank applies it to its own tokens. Parts may
    differ in size if `uneven`. A split rowwise layer outputs partial sums; the first rank adds the bias. A residual
    layer's outputs are added to the residual stream. If files rename this layer or join it with others,
    `joined_name` is its name in transformers.
    """

    joined_name: str | None = None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernels: Kernels,
        bias: bool = False,
        style: Style = "colwise",
        unit: int = 1,
        uneven: bool = False,
        is_residual: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.is_residual = is_residual
        self.kernels = kernels
        self.style: Style = style
        self.unit = unit
        self.uneven = uneven

    def reset_parameters(self) -> None:
        """Reset as in torch, except on the meta device, where that would import torch's compiler in 2 s."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs), of any floating dtype, to (..., outputs), in the weight's dtype."""
        omits_bias = self.style == "rowwise" and self.ranks.group.rank > 0
        return self.multiply_by_weight(x, None if omits_bias else self.bias)

    def multiply_by_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias (..., outputs) for x (..., inputs), in the layer's format."""
        return self.kernels.linear(x.to(self.weight.dtype), self.weight, bias)

    def head(self) -> Head:
        """Return the layer as a head; cross entropy is fused with the product if there is no bias."""
        if self.bias is None:
            return LinearHead(self.weight, self.out_features, self.kernels, self.ranks)
        # The tensors of this forward pass, which the backward pass computes with again.
        project = partial(self.kernels.linear, weight=self.weight, bias=self.bias)
        return ChunkedHead(lambda hidden: project(hidden.to(self.weight.dtype)), self.out_features, self.ranks)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Return how outputs or inputs are split."""
        if self.style == "whole":
            return {}
        split = SplitDim(1 if self.style == "rowwise" else 0, self.unit, self.uneven)
        return {"weight": split} | ({} if self.bias is None or self.style == "rowwise" else {"bias": split})

    def parameter_roles(self) -> Mapping[str, Role]:
        if self.is_residual:
            return {"weight": RESIDUAL_ROLE, "bias": RESIDUAL_BIAS_ROLE}
        return {"weight": MATRIX_ROLE, "bias": BIAS_ROLE}


class RMSNorm(nn.Module):
    """
    RMSNorm over the last dimension, x / sqrt(mean(x^2) + eps) * weight; the weight is (width,).

    If `zero_centered`, the factor is 1 + weight, and the weight starts at 0.
    """

    def __init__(self, width: int, eps: float, kernels: Kernels, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if zero_centered else torch.ones(width))
        self.eps = eps
        self.zero_centered = zero_centered
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width), in its dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps, self.zero_centered)

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"weight": Role(False, 0.0)} if self.zero_centered else {}


class ProjectionNorm(RMSNorm, TensorParallel):
    """RMSNorm over all query or key heads; tensor-parallel ranks partition the channels by whole heads."""

    def __init__(self, width: int, eps: float, kernels: Kernels, unit: int) -> None:
        super().__init__(width, eps, kernels)
        self.width = width
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width), or this rank's channels of it, in its dtype."""
        if self.ranks.size == 1:
            return super().forward(x)
        wide = x.to(at_least_float32(x))
        # Each rank divides its own channels by the norm of all, so both sums have to be over the ranks.
        squares = self.ranks.copy_to_ranks(self.ranks.all_reduce(wide.square().sum(-1, keepdim=True)))
        return (wide * (squares / self.width + self.eps).rsqrt() * self.weight.to(wide.dtype)).to(x.dtype)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Return how the channels are split."""
        return {"weight": SplitDim(0, self.unit)}


class Embedding(nn.Embedding, TensorParallel, HeadLayer):
    """
    Embedding table: `weight` (vocab_size, hidden_size) has a token's vector in a row.

    Tensor-parallel ranks partition the vocabulary and return zeros for other ranks' tokens.
    """

    def __init__(self, vocab_size: int, hidden_size: int, kernels: Kernels) -> None:
        super().__init__(vocab_size, hidden_size)
        self.kernels = kernels

    def reset_parameters(self) -> None:
        """Reset as in torch, except on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids, int64 (...), to vectors (..., hidden_size) in the weight's dtype."""
        return self.look_up_rows(tokens, self.weight)

    def look_up_rows(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return rows (..., width) from a table (vocab_size, width), or from its part, for token ids int64 (...)."""
        rows, is_local = self.ranks.find_local_rows_and_mask(tokens, self.num_embeddings)
        vectors = self.kernels.embedding(rows, table)
        return vectors if is_local is None else vectors * is_local

    def head(self) -> Head:
        """Return the head tied to the table."""
        return LinearHead(self.weight, self.num_embeddings, self.kernels, self.ranks)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Return how the vocabulary is split."""
        return {"weight": VOCABULARY}

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"weight": TABLE_ROLE}


class _Chunked:
    """Base for heads: it computes logits chunk by chunk, so that they need not fit in memory at once."""

    vocab_size: int

    def logits(self, hidden: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., vocab_size)."""
        raise NotImplementedError

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """
        Apply `function` to logits for hidden (..., hidden_size), `max_bytes` at a time.

        It returns a number per token, (tokens,), or several, (tokens, n); the result is (...) or (..., n).
        """
        size = max(1, max_bytes // (self.vocab_size * torch.float32.itemsize))
        shape = hidden.shape[:-1]
        flat = [tensor.flatten(0, len(shape) - 1) for tensor in (hidden, *tensors)]
        # The rows are flattened, so that a chunk may end inside of a row and `max_bytes` also bounds long rows.
        chunks = zip(*(torch.split(tensor, size) for tensor in flat), strict=True)
        values = torch.cat([self._map_recomputed_logits_chunk(function, *parts) for parts in chunks])
        return values.view(*shape, *values.shape[1:])

    def _map_recomputed_logits_chunk(self, function: Callable[..., Tensor], hidden: Tensor, *parts: Tensor) -> Tensor:
        """Apply `function` to one chunk's logits; the backward pass computes the logits again."""

        def compute(hidden: Tensor, *parts: Tensor) -> Tensor:
            return function(self.logits(hidden), *parts)

        if not torch.is_grad_enabled():
            return compute(hidden, *parts)
        # Re-entrant activation checkpointing does not support the split backward pass of zero-bubble schedules.
        computed: Tensor = checkpoint(compute, hidden, *parts, use_reentrant=False)
        return computed


@attrs.define(eq=False)  # not frozen: torch 2.11 can't trace how a frozen class sets its attributes
class LinearHead(_Chunked):
    """
    Head without a bias: logits are hidden @ weight.T.

    `weight` (vocab_size, hidden_size) belongs to a layer or to the tied embedding. With several `ranks`, a rank has the
    rows for its part of the vocabulary.
    """

    weight: Tensor
    vocab_size: int
    kernels: Kernels
    ranks: TensorRanks

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> TokenLosses:
        part = self.ranks.get_vocabulary_part(self.vocab_size)
        return self.kernels.linear_cross_entropy(hidden.to(self.weight.dtype), self.weight, targets, weights, part)

    def logits(self, hidden: Tensor) -> Tensor:
        local = self.kernels.linear(self.ranks.copy_to_ranks(hidden.to(self.weight.dtype)), self.weight)
        return self.ranks.gather_last_dimension(local, self.vocab_size)

    def mean_logits(self, hidden: Tensor) -> Tensor:
        dtype = at_least_float32(hidden)
        # The mean of the logits is the logit of the weight's mean row: one product with a vector.
        row = self.weight.sum(0, dtype=dtype) / self.vocab_size
        return self.ranks.all_reduce(self.ranks.copy_to_ranks(hidden.to(dtype)) @ row)


@attrs.define(eq=False)
class ChunkedHead(_Chunked):
    """
    Head that a function `project` computes, such as a linear layer with an adapter.

    `project` maps (..., hidden_size) to (..., vocab_size), or to this rank's part of the vocabulary.
    """

    project: Callable[[Tensor], Tensor]
    vocab_size: int
    ranks: TensorRanks = ALONE

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ranks.gather_last_dimension(self.project(self.ranks.copy_to_ranks(hidden)), self.vocab_size)

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> TokenLosses:
        both = self.map_logits(_gather_target_logit_and_lse, hidden, targets)
        losses = (both[..., 1] - both[..., 0]).masked_fill(targets == IGNORE_INDEX, 0.0)
        return TokenLosses(losses if weights is None else losses * weights, both[..., 1])

    def mean_logits(self, hidden: Tensor) -> Tensor:
        return self.map_logits(lambda logits: logits.mean(-1, dtype=at_least_float32(logits)), hidden)


def _gather_target_logit_and_lse(logits: Tensor, targets: Tensor) -> Tensor:
    """Return by token the target's logit (arbitrary if ignored) and the log-sum-exp: (tokens, 2), at least float32."""
    wide = logits.to(at_least_float32(logits))
    return torch.stack([wide.gather(-1, targets.clamp_min(0)[:, None])[:, 0], logsumexp_in_fixed_order(wide)], -1)


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """Return a dtype for sums: the tensor's, or float32 if that is narrower."""
    return torch.promote_types(tensor.dtype, torch.float32)
