"""The module of a span of layers of a transformers model, with drawloom's linear layers and embedding."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.fallback.attention import RowAttention
from drawloom.components.model.fallback.errors import SelfCheckError
from drawloom.components.model.layers import Embedding, Linear
from drawloom.components.parallel.tensor import ALONE
from drawloom.components.ports.model import Finish, HeadLayer, Kernels, LayerRange, TokenContext


class PassThrough(nn.Module):
    """
    Placeholder for a module outside of the span, which returns its first input.

    Layers keep their numbers, and plain attributes that a model's forward pass reads from a layer.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float)}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return hidden states (rows, length, hidden_size) unchanged."""
        return hidden_states


class KnownBuffers:
    """Module that keeps the values of its buffers, which transformers computes in constructors."""

    def reset_parameters(self) -> None:
        """Fill the buffers in place with the values from the constructor."""
        values: dict[str, Tensor] = self.__dict__["values_of_buffers"]
        module: Any = self
        for name, value in values.items():
            module.get_buffer(name).copy_(value)


class TransformersLM(nn.Module):
    """Span of a transformers model: `model`, its base model, and `lm_head` if the span has an untied head."""

    def __init__(self, whole: Any, span: LayerRange, kernels: Kernels) -> None:
        super().__init__()
        check_structure(whole)
        self.span = span
        self.kernels = kernels
        self.tied = bool(whole.config.tie_word_embeddings)
        self.model = whole.model
        self.lm_head: Any
        self.register_module("lm_head", whole.lm_head if span.head and not self.tied else None)
        self._drop_other_modules()
        use_kernels(self, kernels)

    def _drop_other_modules(self) -> None:
        layers: nn.ModuleList = self.model.layers
        for number, layer in enumerate(layers):
            if not self.span.first <= number < self.span.last:
                layers[number] = PassThrough(layer)
        if not self.span.head:
            self.model.norm = PassThrough(self.model.norm)
        if not (self.span.embedding or (self.span.head and self.tied)):
            self.model.embed_tokens = PassThrough(self.model.embed_tokens)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of the span, in the order of use."""
        return [layer for layer in self.model.layers if not isinstance(layer, PassThrough)]

    def forward(self, inputs: Tensor, shared: TokenContext, finish: Finish | None = None) -> Any:
        """
        Return hidden states (rows, length, hidden_size), of the parameters' dtype, or `finish(hidden, head)`.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states.
        """
        if shared.hidden_states is not None:
            raise ValueError("model.transformers does not return hidden states of inner layers; use a native family")
        hidden = self.run(inputs, shared, RowAttention(self.kernels, shared))
        if not self.span.head or finish is None:
            return hidden
        layer: HeadLayer = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return layer.finish(hidden, finish)

    def run(self, inputs: Tensor, shared: TokenContext, documents: RowAttention) -> Tensor:
        """Return the base model's last hidden states (rows, length, hidden_size) for inputs as in `forward`."""
        key = "input_ids" if self.span.embedding else "inputs_embeds"
        output = self.model(**{key: inputs}, position_ids=shared.positions, use_cache=False, documents=documents)
        hidden: Tensor = output.last_hidden_state
        return hidden


def check_structure(whole: Any) -> None:
    """Raise SelfCheckError for a model whose parts have other names than Llama's."""
    base: Any = getattr(whole, "model", None)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != getattr(whole.config, "num_hidden_layers", None):
        raise SelfCheckError("layers", "the layers are not in model.layers")
    for name in ("norm", "embed_tokens"):
        if not isinstance(getattr(base, name, None), nn.Module):
            raise SelfCheckError("layers", f"there is no module model.{name}")
    if not isinstance(base.embed_tokens, nn.Embedding):
        raise SelfCheckError("layers", "model.embed_tokens is not an embedding")
    head = getattr(whole, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise SelfCheckError("head", "lm_head is not a linear layer without a bias")


def use_kernels(module: nn.Module, kernels: Kernels) -> None:
    """Turn linear layers and embeddings into drawloom's in place, with the same parameters, and keep buffers."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear
            vars(part).update(is_residual=False, kernels=kernels, style="colwise", unit=1, uneven=False, ranks=ALONE)
        elif isinstance(part, nn.Embedding):
            _use_embedding(part, kernels)
        if values := {name: _on_cpu(buffer) for name, buffer in part.named_buffers(recurse=False)}:
            part.__dict__["values_of_buffers"] = values
            kind: Any = type(part)
            part.__class__ = type(kind.__name__, (KnownBuffers, kind), {"__module__": kind.__module__})


def _use_embedding(part: nn.Embedding, kernels: Kernels) -> None:
    kind: Any = type(part)
    # Subclasses scale vectors; the next class in their order is drawloom's, which looks the vectors up.
    part.__class__ = Embedding if kind is nn.Embedding else type(kind.__name__, (kind, Embedding), {})
    vars(part).update(kernels=kernels, ranks=ALONE)


def _on_cpu(buffer: Tensor) -> Tensor:
    return buffer.detach().to("cpu", copy=True) if not buffer.is_meta else torch.zeros(buffer.shape, dtype=buffer.dtype)
