"""The module for a span of layers, with the submodules and names of Hugging Face's models."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import Branch, LayerContext, MixerSpec, RecurrentSpec
from drawloom.components.model.layers import Embedding, Linear, RMSNorm, at_least_float32
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import (
    Finish,
    ForwardFlops,
    HeadLayer,
    Kernels,
    LayerRange,
    ModelScaling,
    Role,
    TokenContext,
    parameter_roles,
)


def check_hidden_states_request(shared: TokenContext, layers: int) -> None:
    """Raise ValueError if a model with `layers` layers can't return the hidden states requested in the context."""
    asked = () if shared.hidden_states is None else shared.hidden_states.layers
    if unknown := [number for number in asked if not 0 <= number <= layers]:
        raise ValueError(f"there are no hidden states of layer {unknown[0]}: the model has layers 0 to {layers}")
    if shared.mean_weights is not None and (shared.hidden_states is None or shared.hidden_states.documents is None):
        raise ValueError("mean_weights needs document means; request hidden_states=HiddenStates(layers, documents=1)")
    if asked and shared.part is not None:
        raise ValueError(
            "hidden states can't be returned with context parallelism, because each rank has only a part of a row"
        )


def compute_document_means(
    hidden: Tensor, documents: Tensor, document_count: int, weights: Tensor | None = None
) -> Tensor:
    """
    Return the mean over every document's tokens, at least float32 (rows, document_count, hidden_size); zeros without
    tokens.

    hidden: (rows, length, hidden_size); documents: int64 (rows, length), where ids from `document_count` on are
    skipped; weights: bool or floating (rows, length); default: 1.
    """
    dtype = at_least_float32(hidden)
    numbers = torch.arange(document_count, device=documents.device)
    # A product instead of a scattered sum, because its order of additions is fixed.
    members = (documents[:, None, :] == numbers[:, None]).to(dtype)
    if weights is not None:
        members = members * weights[:, None, :]
    total = members.sum(-1, keepdim=True)
    return members @ hidden.to(dtype) / total.masked_fill(total == 0, 1)


class Decoder(TensorParallel):
    """
    Layers under their numbers in the whole model, with or without the embedding and the last norm.

    `layers` is a ModuleDict, since a ModuleList would number every span's layers from 0. A tied head needs the
    embedding's weight, so a span with the head has `embed_tokens`, too: a separate tensor if the embedding itself is on
    another span.
    """

    def __init__(self, architecture: DecoderConfig, span: LayerRange, kernels: Kernels) -> None:
        super().__init__()
        self.architecture = architecture
        self.span = span
        self.kernels = kernels
        if span.embedding or (span.head and architecture.tie_word_embeddings):
            self.embed_tokens = Embedding(architecture.vocab_size, architecture.hidden_size, kernels)
        branches = {number: architecture.branches_of(number) for number in range(span.first, span.last)}
        self.attention = [find_attention_spec(layer) for layer in branches.values()]
        # By index, because torch 2.11 can't compile a dict with rotary positions as keys.
        self.ropes = [*dict.fromkeys(None if layer is None else layer.rope for layer in self.attention)]
        self.rope_indices = [self.ropes.index(None if layer is None else layer.rope) for layer in self.attention]
        specs = [branch.spec for layer in branches.values() for branch in layer]
        self.is_recurrent = any(isinstance(spec, RecurrentSpec) for spec in specs)
        layer_class = resolve_name(f"{__package__}.{architecture.layer_class}")
        self.layers = nn.ModuleDict(
            {str(number): layer_class(architecture, layer, kernels) for number, layer in branches.items()}
        )
        if span.head:
            self.norm = RMSNorm(
                architecture.hidden_size, architecture.rms_norm_eps, kernels, architecture.zero_centered
            )

    def forward(self, inputs: Any, shared: TokenContext) -> Any:
        """
        Return hidden states (rows, length, hidden_size), of the parameters' dtype, after the last norm if the span has
        it; with `shared.hidden_states` a pair of them and the requested hidden states.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states. With `ranks`
        hidden states between stages are split tokens.
        """
        wanted, documents = shared.hidden_states, shared.document_ids
        kept: dict[int, Tensor] = {}
        whole = partial(self.ranks.gather_tokens_without_grad_sum, shape=shared.positions.shape)
        if wanted is not None:
            check_hidden_states_request(shared, self.architecture.num_hidden_layers)
            inputs, before = inputs if isinstance(inputs, tuple) else (inputs, {})
            kept |= before
        hidden = inputs
        for number, hidden in self._iterate_layer_outputs(inputs, shared):
            if wanted is not None and number in wanted.layers:
                kept[number] = rows = whole(hidden)
                if wanted.documents is not None:
                    kept[number] = compute_document_means(rows, documents, wanted.documents, shared.mean_weights)
        if self.span.head:
            hidden = whole(hidden)
            if (multiplier := self.architecture.logit_multiplier) != 1.0:
                hidden = hidden * multiplier  # logits are linear in hidden states
        return hidden if wanted is None else (hidden, kept)

    def _iterate_layer_outputs(self, hidden: Tensor, shared: TokenContext) -> Iterator[tuple[int, Tensor]]:
        """
        Yield the embedding's output as layer 0, then each layer's, and the last norm's under the last layer's number.

        hidden: token ids, int64 (rows, length), where the span has the embedding, else hidden states.
        """
        inputs = hidden
        if self.span.embedding:
            hidden = self.ranks.reduce_scatter_tokens(self.embed_tokens(hidden))
            if (multiplier := self.architecture.embedding_multiplier) != 1.0:
                if self.architecture.rounds_embedding_multiplier:
                    multiplier = torch.tensor(multiplier, device="cpu").to(hidden.dtype).item()
                hidden = hidden * multiplier
            yield 0, hidden
        contexts = self.build_layer_contexts(shared, inputs, hidden)
        for (number, layer), context in zip(self.layers.items(), contexts, strict=True):
            hidden = layer(hidden, context)
            yield int(number) + 1, hidden
        if self.span.head:
            yield self.architecture.num_hidden_layers, self.norm(hidden)

    def build_layer_contexts(self, shared: TokenContext, inputs: Tensor, hidden: Tensor) -> list[LayerContext]:
        """
        Return every layer's context; equal windows share a mask, equal rotary positions share angles.

        `inputs` are the span's, such as tokens (rows, length); `hidden` are the first layer's.
        """
        specs = [attention for attention in self.attention if attention is not None]
        masks = {
            window: self.kernels.attention_mask(
                shared.document_ids, window, shared.part, shared.cache, shared.one_document_per_row
            )
            for window in dict.fromkeys(attention.window for attention in specs)
        }
        angles = [None if rope is None else rope.compute_cos_sin(shared.positions) for rope in self.ropes]
        recurrence = None
        if self.is_recurrent:
            recurrent: Any = self.kernels
            recurrence = recurrent.recurrence_mask(shared.document_ids, shared.part, shared.cache)
        without = LayerContext(
            shared.document_ids, weights=shared.weights, padding=shared.padding, recurrence=recurrence, links={}
        )
        return [
            without if layer is None else without._replace(angles=angles[rope], mask=masks[layer.window])
            for layer, rope in zip(self.attention, self.rope_indices, strict=True)
        ]


def find_attention_spec(branches: Sequence[Branch]) -> MixerSpec | None:
    """Return the specification of a layer's attention, or None if the layer has no attention."""
    return next((branch.spec for branch in branches if isinstance(branch.spec, MixerSpec)), None)


class CausalLM(nn.Module):
    """Span of a model: `model`, the decoder, and `lm_head` if the span has the head and the head is not tied."""

    def __init__(
        self,
        architecture: DecoderConfig,
        span: LayerRange,
        kernels: Kernels,
        scaling: ModelScaling = ModelScaling(),  # noqa: B008  it is frozen
    ) -> None:
        super().__init__()
        self.span = span
        self.kernels = kernels
        self.scaling = scaling
        self.model = resolve_name(f"{__package__}.{architecture.decoder_class}")(architecture, span, kernels)
        self.tied = architecture.tie_word_embeddings
        self.lm_head: Any
        has_own_head = span.head and not self.tied
        head = Linear(architecture.hidden_size, architecture.vocab_size, kernels, uneven=True) if has_own_head else None
        self.register_module("lm_head", head)

    def name_joined_layers(self) -> None:
        """Set `joined_name` in linear layers that transformers names otherwise or joins, before layers are adapted."""
        from drawloom.components.model.decoder.mapper import create_decoder_mapper

        # Experts are many, and no linear layers.
        parameters = {name: part for name, part in self.named_parameters() if ".experts." not in name}
        for group in create_decoder_mapper(parameters, self.model.architecture, "model.").groups:
            for name in group.inputs if group.outputs != group.inputs else ():
                layer = self.get_submodule(name.rpartition(".")[0])
                if isinstance(layer, Linear):
                    layer.joined_name = group.outputs[0].rpartition(".")[0]

    def forward(self, inputs: Tensor, shared: TokenContext, finish: Finish | None = None) -> Any:
        """
        Return hidden states (rows, length, hidden_size), of the parameters' dtype, or `finish(hidden, head)`.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states.
        """
        hidden = self.model(inputs, shared)
        if not self.span.head or finish is None:
            return hidden
        # An adapter of a tied head adds a layer.
        layer: HeadLayer = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return layer.finish_with_head(hidden, finish)

    def role_with_scaling(self, name: str, role: Role) -> Role:
        """Return a role with the scaling for its place (head, residual output, other) and kind (matrix, vector)."""
        scaling = self.scaling
        if ".layers." not in name:
            return attrs.evolve(role, scaling=scaling.head if name.startswith("lm_head.") else scaling.outer)
        if role.is_residual:
            return attrs.evolve(role, scaling=scaling.residual if role.is_matrix else scaling.residual_vector)
        return attrs.evolve(role, scaling=scaling.matrix if role.is_matrix else scaling.vector)


def count_forward_flops(module: Any, architecture: DecoderConfig) -> ForwardFlops:
    """Count FLOPs in a CausalLM's forward pass, by parameter and by pair; it may be on the meta device."""
    shapes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    by_parameter = {}
    for name, role in parameter_roles(module):
        # A tied table is multiplied by where it is the head.
        products = 1.0 if ".embed_tokens." in name and architecture.tie_word_embeddings else role.products
        if name in shapes and products:
            by_parameter[name] = 2.0 * shapes[name] * products
    per_pair: Counter[int | None] = Counter()
    per_token = 0.0
    for layer in range(module.span.first, module.span.last):
        for branch in architecture.branches_of(layer):
            if isinstance(branch.spec, MixerSpec):
                per_pair.update(branch.spec.pair_flops_by_window)
            elif isinstance(branch.spec, RecurrentSpec):
                per_token += branch.spec.token_flops
    return ForwardFlops(by_parameter, {window: float(flops) for window, flops in per_pair.items()}, per_token)
