"""
The module of a span of layers of a transformers model, with drawloom's linear layers and embedding.

A model's parts, base model, embedding, layers and head, have names that differ between families.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import UserError
from drawloom.components.model.layers import ChunkedHead, Embedding, Linear
from drawloom.components.parallel.tensor_ranks import ALONE
from drawloom.components.weights.adapted import EMBEDDING
from drawloom.ports import AttentionOptions, Finish, Head, Kernels, LayerRange, TokenContext, put_class_before


class SelfCheckError(Exception):
    """Failed self-check: the name of the check, and the reason."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(f"{check}: {reason}")
        self.check = check
        self.reason = reason


@attrs.frozen
class Parts:
    """
    Names of a causal LM's parts, which differ between families: `model.layers`, `transformer.h`.

    The modules `before` the layers, except for the embedding, and `after` them belong to the first and last stage. A
    `plain_head` is a linear layer; logits of other heads are computed by transformers. `no_stages` is why the model
    can't be several pipeline stages, or "". `constants` maps names without layer numbers to the initial value of
    parameters that start at a constant.
    """

    base: str
    layers: str
    embedding: str
    head: str
    tied: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    plain_head: bool = True
    no_stages: str = ""
    constants: Mapping[str, float] = attrs.field(factory=dict)


def get_first_line(error: Exception) -> str:
    """Return the first line in an error's text that does not end in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)


def first_config_value(config: Any, *keys: str) -> Any:
    """Return the value of the first key that a transformers config has, unless it is null; None without such a key."""
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), None)


def mask_layer_number(name: str) -> str:
    """Return a parameter's name with the number of its layer replaced by a star."""
    return re.sub(r"\.\d+\.", ".*.", name)


def find_model_parts(whole: Any) -> Parts:
    """Find a causal LM's embedding, layers, norm and head. Raises SelfCheckError for a model without these parts."""
    names = {part: name for name, part in whole.named_modules()}
    try:
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # the model's class has none
        embedding, head = None, None
    if not isinstance(embedding, nn.Embedding) or "." not in names[embedding]:
        raise SelfCheckError("layers", "the model has no base model with a token embedding")
    base = whole.get_submodule(names[embedding].partition(".")[0])
    if type(head) is not nn.Linear or {names[part] for part in whole.children()} != {names[base], names[head]}:
        raise SelfCheckError("head", f"{type(whole).__name__} is not just a base model and a linear head")
    count = first_config_value(whole.config, "num_hidden_layers")
    lists = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    fitting = [part for part in lists if len(part) == count and any(True for _ in part.parameters())]
    if not fitting:
        lengths = sorted({len(part) for part in lists})
        raise SelfCheckError(
            "layers", f"no ModuleList has num_hidden_layers = {count} modules; their lengths are {lengths}"
        )
    return Parts(names[base], names[fitting[0]], names[embedding], names[head], head.weight is embedding.weight)


def add_outer_modules(whole: nn.Module, parts: Parts, calls: Sequence[nn.Module]) -> Parts:
    """
    Add the outermost modules of the base model before and after the layers to the parts.

    `calls` are all modules that a pass through the base model calls, in order. Modules before the layers without
    parameters, such as rotary angles, and modules called between layers belong to every stage.
    """
    path = parts.layers.split(".")
    owners = {".".join(path[:count]) for count in range(1, len(path))}
    inner = owners | {parts.layers, parts.embedding}
    outer = [
        (name, part) for name, part in whole.named_modules() if name.rpartition(".")[0] in owners and name not in inner
    ]
    layers: Any = whole.get_submodule(parts.layers)
    indices = [index for index, part in enumerate(calls) if part in {*layers}] or [len(calls)]
    before, after = calls[: indices[0]], calls[indices[-1] :]
    return attrs.evolve(
        parts,
        before=tuple(
            name
            for name, part in outer
            if part in before and part not in calls[indices[0] :] and any(True for _ in part.parameters())
        ),
        after=tuple(name for name, part in outer if part in after and part not in calls[: indices[-1]]),
    )


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


class NoVectors(PassThrough):
    """Placeholder for a table of vectors that the first stage adds to token vectors, such as learned positions."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return zero, of shape (), which is added."""
        return torch.zeros(())


NAME = "drawloom"
"""Name of the attention in transformers' registry, which has no entry for its masks, so that no mask is built."""


class RowAttention:
    """Attention within the documents of a microbatch; all layers share the masks of the same window."""

    def __init__(self, kernels: Kernels, shared: TokenContext) -> None:
        self.kernels = kernels
        self.shared = shared
        self.calls = 0  # the self-check refuses a model whose layers never call attention
        self._masks: dict[int | None, Any] = {}

    def count_call_and_get_mask(self, window: int | None) -> Any:
        """Count a call of attention, and return its mask, computed once per microbatch and window."""
        self.calls += 1
        if window not in self._masks:
            shared = self.shared
            self._masks[window] = self.kernels.attention_mask(
                shared.document_ids, window, shared.part, shared.cache, shared.one_document_per_row
            )
        return self._masks[window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    documents: RowAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """
    Return attention as (rows, length, heads, v_dim), with the signature of transformers' attention functions.

    Queries are (rows, heads, length, head_dim), keys (rows, kv_heads, length, head_dim), values (rows, kv_heads,
    length, v_dim), sinks (heads,). Raises SelfCheckError without the keyword `documents`.
    """
    if documents is None:
        raise SelfCheckError("keyword", f"{type(module).__name__} does not pass keywords on to attention")
    if attention_mask is not None:
        raise SelfCheckError("keyword", f"{type(module).__name__} has a mask of its own")
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    sinks = None if s_aux is None else s_aux.to(q.dtype)
    mask = documents.count_call_and_get_mask(sliding_window)
    return documents.kernels.attention(q, k, v, mask, AttentionOptions(scaling, softcap), sinks), None


def register_attention() -> None:
    """Register `attend` in transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


class KnownBuffers:
    """Mixin: `reset_parameters` restores the buffers' values, which transformers computes in constructors."""

    def reset_parameters(self) -> None:
        """Fill the buffers in place with the values from the constructor."""
        values: dict[str, Tensor] = self.__dict__["values_of_buffers"]
        module: Any = self
        for name, value in values.items():
            module.get_buffer(name).copy_(value)


class KeepsDtype:
    """Mixin for norms: outputs have the inputs' dtype, even if the norm's parameters are wider."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise hidden states (..., width), in their dtype."""
        norm: Any = super()
        output: Any = norm.forward(hidden_states, *args, **kwargs)
        # Norms of several tensors, as in Zaya, return tuples.
        return output.to(hidden_states.dtype) if isinstance(output, Tensor) else output


class WideLayerNorm(nn.LayerNorm):
    """LayerNorm for inputs and parameters with different dtypes: it computes in the widest one."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input (..., width), in its dtype."""
        dtype = input.dtype
        for parameter in self.parameters():
            dtype = torch.promote_types(dtype, parameter.dtype)
        weight, bias = (None if part is None else part.to(dtype) for part in (self.weight, self.bias))
        output = F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return output.to(input.dtype)


class TransformersLM(nn.Module):
    """Span of a transformers model: its base model, and its head if the span has an untied one."""

    position_count: int | None = None
    """Learned positions, as in `LimitedPositions`."""

    def __init__(self, whole: Any, parts: Parts, span: LayerRange, kernels: Kernels) -> None:
        super().__init__()
        self.span = span
        self.kernels = kernels
        self.parts = parts
        self.add_module(parts.base, whole.get_submodule(parts.base))
        if span.head and not parts.tied:
            self.add_module(parts.head, whole.get_submodule(parts.head))
        # Other stages' modules become placeholders without parameters.
        layers = self._layers
        for number, layer in enumerate(layers):
            if not span.first <= number < span.last:
                layers[number] = PassThrough(layer)
        for name in (() if span.embedding else parts.before) + (() if span.head else parts.after):
            replaced = self.get_submodule(name)
            placeholder = NoVectors if isinstance(replaced, nn.Embedding) else PassThrough
            self.set_submodule(name, placeholder(replaced))
        if not (span.embedding or (span.head and parts.tied)):
            self.set_submodule(parts.embedding, PassThrough(self.get_submodule(parts.embedding)))
        convert_layers_to_kernels(self, kernels)
        table = self.get_submodule(parts.embedding)
        if parts.tied and parts.embedding != EMBEDDING and type(table) is Embedding:
            table.__class__ = TiedTable
        # Outside of the registered modules, because it has no parameters.
        self.__dict__["outer"] = None if parts.plain_head else OuterModel(whole, parts)

    @property
    def _layers(self) -> nn.ModuleList:
        return self.get_submodule(self.parts.layers)  # type: ignore[return-value]

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of the span, in the order of use."""
        return [layer for layer in self._layers if not isinstance(layer, PassThrough)]

    def forward(self, inputs: Tensor, shared: TokenContext, finish: Finish | None = None) -> Any:
        """
        Return hidden states (rows, length, hidden_size), of the parameters' dtype, or `finish(hidden, head)`.

        Inputs are token ids, int64 (rows, length), where the span has the embedding, else hidden states. Raises
        UserError for inner layers' hidden states, and for rows longer than the position table.
        """
        length = inputs.shape[1] + (shared.cache.length if shared.cache else 0)
        if self.position_count and length > self.position_count:
            raise UserError(
                f"the model has a table of {self.position_count} learned positions, and a text has {length} tokens; "
                "write a smaller context"
            )
        if shared.hidden_states is not None:
            raise UserError("model.transformers does not return hidden states of inner layers; use a native family")
        hidden = self.run_base_model(inputs, shared, RowAttention(self.kernels, shared))
        if not self.span.head or finish is None:
            return hidden
        layer: Any = self.get_submodule(self.parts.embedding if self.parts.tied else self.parts.head)
        outer: OuterModel | None = self.__dict__["outer"]
        return layer.finish_with_head(
            hidden, finish if outer is None else lambda hidden, head: finish(hidden, outer.head(head))
        )

    def run_base_model(self, inputs: Tensor, shared: TokenContext, documents: RowAttention) -> Tensor:
        """Return the base model's last hidden states (rows, length, hidden_size) for inputs as in `forward`."""
        key = "input_ids" if self.span.embedding else "inputs_embeds"
        base = self.get_submodule(self.parts.base)
        output = base(**{key: inputs}, position_ids=shared.positions, use_cache=False, documents=documents)
        return output.last_hidden_state  # type: ignore[no-any-return]


class TiedTable(Embedding):
    """Embedding tied to the head, under a name unknown to adapter exports, so LoRA skips it."""


class OuterModel:
    """Computation from hidden states to logits in a transformers model: everything outside its base model."""

    def __init__(self, whole: Any, parts: Parts) -> None:
        self.whole = whole
        self.product = _Product()
        whole.set_submodule(parts.base, _IdentityBaseModel())
        whole.set_submodule(parts.head, self.product)

    def head(self, linear: Head) -> Head:
        """Return the model's head, which computes its matrix product by `linear` and the rest by transformers."""
        return ChunkedHead(partial(self._compute_logits, linear.logits), self.whole.config.vocab_size)

    def _compute_logits(self, multiply: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size) of hidden states (..., hidden_size)."""
        self.product.multiply = multiply
        logits: Tensor = self.whole(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return logits.reshape(*hidden.shape[:-1], -1)


class _IdentityBaseModel(nn.Module):
    """Stand-in for the base model: it returns its inputs as last hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return the inputs, hidden states (1, tokens, hidden_size), unchanged in transformers' output class."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Product(nn.Module):
    """Stand-in for the head's linear layer: it calls `multiply`."""

    multiply: Callable[[Tensor], Tensor]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., vocab_size)."""
        return self.multiply(hidden)


def convert_layers_to_kernels(module: nn.Module, kernels: Kernels) -> None:
    """
    Change the classes of linear layers, embeddings and norms to drawloom's in place; parameters stay, buffer values are
    kept.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear
            vars(part).update(is_residual=False, kernels=kernels, style="colwise", unit=1, uneven=False, ranks=ALONE)
        elif isinstance(part, nn.Embedding):
            kind: Any = type(part)
            # Subclasses scale vectors; the next class in their order is drawloom's, which looks the vectors up.
            part.__class__ = Embedding if kind is nn.Embedding else type(kind.__name__, (kind, Embedding), {})
            vars(part).update(kernels=kernels, ranks=ALONE)
        elif type(part) is nn.LayerNorm:
            part.__class__ = WideLayerNorm
        elif type(part).__name__.endswith("Norm"):
            put_class_before(part, KeepsDtype)
        if buffers := dict(part.named_buffers(recurse=False)):
            part.__dict__["values_of_buffers"] = {
                # A buffer on the meta device has no values.
                name: torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.detach().to("cpu", copy=True)
                for name, buffer in buffers.items()
            }
            put_class_before(part, KnownBuffers)
