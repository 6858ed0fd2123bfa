"""The module of a span of layers, with the submodules and names of Hugging Face's models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.tensor_parallel import TensorParallel
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.layer import Block
from drawloom.components.model.decoder.rope import scaling_of
from drawloom.components.model.layers import Embedding, Linear, RMSNorm
from drawloom.components.ports.model import BatchContext, Finish, HeadLayer, HiddenStates, Kernels, LayerRange
from drawloom.kernels.rope_frequencies import rope_angles


@attrs.define
class Collector:
    """
    Keeps hidden states of layers that are asked for.

    `inputs` are those of the span's first module; `kept` has what earlier spans have kept, and then this one. `whole`
    makes hidden states of whole rows of those that a layer gives.
    """

    inputs: Tensor
    documents: Tensor
    wanted: HiddenStates | None
    kept: dict[int, Tensor]
    whole: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls, inputs: Any, shared: BatchContext, layers: int, whole: Callable[[Tensor], Tensor] = lambda hidden: hidden
    ) -> "Collector":
        """From what a span takes. Raises ValueError for a layer that a model of `layers` layers does not have."""
        wanted = shared.hidden_states
        if wanted is None:
            return cls(inputs, shared.document_ids, None, {}, whole)
        if unknown := [number for number in wanted.layers if not 0 <= number <= layers]:
            raise ValueError(f"there are no hidden states of layer {unknown[0]}: the model has layers 0 to {layers}")
        if shared.part is not None:
            raise ValueError("ranks along 'context' share rows out, and hidden states are of whole rows")
        hidden, kept = inputs if isinstance(inputs, tuple) else (inputs, {})
        return cls(hidden, shared.document_ids, wanted, dict(kept), whole)

    def add(self, layer: int, hidden: Tensor) -> None:
        """Keep what a layer gives, (rows, length, hidden_size), if it is asked for; a later call replaces it."""
        if self.wanted is not None and layer in self.wanted.layers:
            count, rows = self.wanted.documents, self.whole(hidden)
            self.kept[layer] = rows if count is None else means(rows, self.documents, count)

    def with_last(self, hidden: Tensor) -> Any:
        """What the span gives: hidden states (rows, length, hidden_size), in a pair with those that are kept."""
        return hidden if self.wanted is None else (hidden, self.kept)


def means(hidden: Tensor, documents: Tensor, count: int) -> Tensor:
    """
    Means over the tokens of each document: at least float32 (rows, count, hidden_size), zeros where there is none.

    hidden: (rows, length, hidden_size); documents: int64 (rows, length), of which those from `count` on are left out.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    numbers = torch.arange(count, device=documents.device)
    # A product and no scattered sum, so that the order of additions, and the result, is the same each time.
    members = (documents[:, None, :] == numbers[:, None]).to(dtype)
    return members @ hidden.to(dtype) / members.sum(-1, keepdim=True).clamp_min(1)


class Decoder(TensorParallel):
    """
    Layers under their numbers in the whole model, with or without the embedding and the last norm.

    `mlp` builds the feed-forward network of a layer, from its number. `layers` is a ModuleDict, since a ModuleList
    would number every span's layers from 0. A tied head needs the embedding's weight: a span with the head holds
    `embed_tokens`, too, a separate tensor if the embedding itself is on another span.
    """

    def __init__(
        self, architecture: DecoderConfig, span: LayerRange, kernels: Kernels, mlp: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.span = span
        self.kernels = kernels
        self.scaling = scaling_of(architecture.rope_scaling, architecture.max_position_embeddings)
        if span.embedding or (span.head and architecture.tie_word_embeddings):
            self.embed_tokens = Embedding(architecture.vocab_size, architecture.hidden_size, kernels)
        self.windows = [architecture.window_of(number) for number in range(span.first, span.last)]
        self.layers = nn.ModuleDict(
            {str(n): Block(architecture, kernels, mlp(n)) for n in range(span.first, span.last)}
        )
        if span.head:
            self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)

    def forward(self, inputs: Any, shared: BatchContext) -> Any:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, behind the last norm if there is one; with
        `shared.hidden_states` a pair of them and those that are asked for.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states. With `ranks`
        hidden states between stages are split tokens.
        """
        whole = partial(self.ranks.gather_tokens_for_all, shape=shared.positions.shape)
        kept = Collector.of(inputs, shared, self.architecture.num_hidden_layers, whole)
        hidden = kept.inputs
        if self.span.embedding:
            hidden = self.ranks.reduce_scatter_tokens(self.embed_tokens(hidden))
            kept.add(0, hidden)
        architecture = self.architecture
        cos, sin = rope_angles(shared.positions, architecture.head_dim, architecture.rope_theta, self.scaling)
        # One mask for all layers of a window.
        masks = {
            window: self.kernels.attention_mask(
                shared.document_ids, window, shared.part, shared.cache, shared.whole_rows
            )
            for window in dict.fromkeys(self.windows)
        }
        for (number, layer), window in zip(self.layers.items(), self.windows, strict=True):
            hidden = layer(hidden, cos, sin, masks[window], shared.weights)
            kept.add(int(number) + 1, hidden)
        if self.span.head:
            hidden = self.norm(hidden)
            kept.add(self.architecture.num_hidden_layers, hidden)
            hidden = whole(hidden)
        return kept.with_last(hidden)


class CausalLM(nn.Module):
    """A span of the model: `model`, the decoder, and `lm_head` if the span has the head and the head is not tied."""

    def __init__(
        self, architecture: DecoderConfig, span: LayerRange, kernels: Kernels, mlp: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.span = span
        self.kernels = kernels
        self.model = Decoder(architecture, span, kernels, mlp)
        self.tied = architecture.tie_word_embeddings
        if span.head and not self.tied:
            self.lm_head = Linear(architecture.hidden_size, architecture.vocab_size, kernels, uneven=True)

    def forward(self, inputs: Tensor, shared: BatchContext, finish: Finish | None = None) -> Any:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, or with the head what `finish` makes of
        them.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states.
        """
        hidden = self.model(inputs, shared)
        if not self.span.head or finish is None:
            return hidden
        # An adapter of a tied head adds a layer.
        layer: HeadLayer = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        return layer.finish(hidden, finish)
