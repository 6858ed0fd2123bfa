"""Layers that compute with the recipe's kernels: linear, RMSNorm, embedding, and the head that a loss uses."""

from collections.abc import Callable, Mapping
from typing import Literal

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.components.parallel.tensor import ALONE, TensorParallel, TensorRanks
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import Head, HeadLayer, Kernels

VOCABULARY = SplitDim(0, uneven=True)
"""How ranks share the rows of a table: the cross entropy and lookups take parts of any size."""


class Linear(nn.Linear, TensorParallel, HeadLayer):
    """
    x @ weight.T, with or without a bias (outputs,); the weight is (outputs, inputs).

    `style`, as in torch and transformers, says how ranks share the layer: `colwise` splits the outputs, `rowwise` the
    inputs, in units of `unit` channels, and with `uneven` not evenly where these do not divide. Rowwise layers give
    partial sums then; the bias is part of the first rank's.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernels: Kernels,
        bias: bool = False,
        style: Literal["colwise", "rowwise"] = "colwise",
        unit: int = 1,
        uneven: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.kernels = kernels
        self.style: Literal["colwise", "rowwise"] = style
        self.unit = unit
        self.uneven = uneven

    def reset_parameters(self) -> None:
        """As in torch; on the meta device nothing, where to draw values would import torch's compiler, in 2 s."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs), of any floating dtype, to (..., outputs), in the weight's dtype."""
        partial = self.style == "rowwise" and self.ranks.group.rank > 0
        return self.kernels.linear(x.to(self.weight.dtype), self.weight, None if partial else self.bias)

    def head(self) -> Head:
        """The layer, without a bias, as a head."""
        return LinearHead(self.weight, self.out_features, self.kernels, self.ranks)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Outputs or inputs."""
        how = SplitDim(1 if self.style == "rowwise" else 0, self.unit, self.uneven)
        return {"weight": how} | ({} if self.bias is None or self.style == "rowwise" else {"bias": how})


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the weight is (width,)."""

    def __init__(self, width: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) in and out, of the dtype of `x`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Embedding, TensorParallel, HeadLayer):
    """
    The embedding table: a vector, a row of `weight` (vocab_size, hidden_size), for each token.

    Ranks share out the vocabulary: each gives zeros for tokens that it does not have.
    """

    def __init__(self, vocab_size: int, hidden_size: int, kernels: Kernels) -> None:
        super().__init__(vocab_size, hidden_size)
        self.kernels = kernels

    def reset_parameters(self) -> None:
        """As in torch; on the meta device nothing."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        return self.look_up(tokens, self.weight)

    def look_up(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The rows of a table (vocab_size, width), or of this rank's part, for token ids, int64 (...): (..., width)."""
        rows, here = self.ranks.rows_of(tokens, self.num_embeddings)
        vectors = self.kernels.embedding(rows, table)
        return vectors if here is None else vectors * here

    def head(self) -> Head:
        """The head that is tied to the table."""
        return LinearHead(self.weight, self.num_embeddings, self.kernels, self.ranks)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """The vocabulary."""
        return {"weight": VOCABULARY}


class _Chunked:
    """Logits chunk by chunk, for heads of all kinds."""

    vocab_size: int

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (..., vocab_size)."""
        raise NotImplementedError

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """`function` of the logits of hidden (..., hidden_size), chunk by chunk; one number by token, (...)."""
        size = max(1, max_bytes // (self.vocab_size * torch.float32.itemsize))
        shape = hidden.shape[:-1]
        flat = [tensor.flatten(0, len(shape) - 1) for tensor in (hidden, *tensors)]
        # Flattened first, so that a chunk may end inside of a row and the bound holds for long rows.
        chunks = zip(*(torch.split(tensor, size) for tensor in flat), strict=True)
        found = torch.cat([self._map_chunk(function, *parts) for parts in chunks])
        return found.view(*shape, *found.shape[1:])

    def _map_chunk(self, function: Callable[..., Tensor], hidden: Tensor, *parts: Tensor) -> Tensor:
        def compute(hidden: Tensor, *parts: Tensor) -> Tensor:
            return function(self.logits(hidden), *parts)

        if not torch.is_grad_enabled():
            return compute(hidden, *parts)
        # Re-entrant checkpoints can't go backward in two parts, as zero-bubble schedules do.
        computed: Tensor = checkpoint(compute, hidden, *parts, use_reentrant=False)
        return computed


@attrs.define(eq=False)  # not frozen: torch 2.11 can't trace how a frozen class sets its attributes
class LinearHead(_Chunked):
    """
    A head without a bias: logits are hidden @ weight.T.

    weight: (vocab_size, hidden_size), of a layer or of the embedding that it is tied to; of several `ranks` each has
    its part of the vocabulary.
    """

    weight: Tensor
    vocab_size: int
    kernels: Kernels
    ranks: TensorRanks = ALONE

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden (..., hidden_size), targets int64 (...), weights float32 (...) to losses and lse, float32 (...)."""
        part = self.ranks.vocabulary_part(self.vocab_size)
        return self.kernels.linear_cross_entropy(hidden.to(self.weight.dtype), self.weight, targets, weights, part)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (..., vocab_size), in the weight's dtype."""
        mine = self.kernels.linear(self.ranks.copy(hidden.to(self.weight.dtype)), self.weight)
        return self.ranks.gather_last(mine, self.vocab_size)

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (...), at least float32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # The mean of the logits is the logit of the weight's mean row: one product with a vector.
        row = self.weight.sum(0, dtype=dtype) / self.vocab_size
        return self.ranks.sum(self.ranks.copy(hidden.to(dtype)) @ row)


@attrs.define(eq=False)
class ChunkedHead(_Chunked):
    """
    A head of which only the logits are known, such as a linear layer with an adapter.

    `project` takes (..., hidden_size) to (..., vocab_size), or to the part of the vocabulary of one of several `ranks`.
    """

    project: Callable[[Tensor], Tensor]
    vocab_size: int
    ranks: TensorRanks = ALONE

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (..., vocab_size)."""
        return self.ranks.gather_last(self.project(self.ranks.copy(hidden)), self.vocab_size)

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden (..., hidden_size), targets int64 (...), weights float32 (...) to losses and lse, float32 (...)."""
        both = self.map_logits(_target_and_lse, hidden, targets)
        losses = (both[..., 1] - both[..., 0]).masked_fill(targets == IGNORE_INDEX, 0.0)
        return losses if weights is None else losses * weights, both[..., 1]

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (...), at least float32."""
        return self.map_logits(lambda logits: logits.mean(-1, dtype=_wide(logits)), hidden)


def _target_and_lse(logits: Tensor, targets: Tensor) -> Tensor:
    """The logit of each target, of any where it is ignored, and the log-sum-exp: (tokens, 2), at least float32."""
    wide = logits.to(_wide(logits))
    return torch.stack([wide.gather(-1, targets.clamp_min(0)[:, None])[:, 0], wide.logsumexp(-1)], -1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
