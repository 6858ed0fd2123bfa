"""Ports of models, which build modules, and of the heads and kernels that modules compute with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.graph import port


@attrs.frozen
class LayerRange:
    """Span of a model on one stage: layers `first` to before `last`, with or without the embedding and the head."""

    first: int
    last: int
    embedding: bool
    head: bool


class RowPart(Protocol):
    """This rank's tokens of each row, if several ranks share the rows (context parallelism)."""

    @property
    def places(self) -> Tensor:
        """The indices of this rank's tokens in the row, int64 (tokens,), ascending."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Gather whole rows (rows, length, ...) from every rank's `part` (rows, tokens, ...); differentiable."""
        ...


@attrs.frozen
class HiddenStates:
    """
    Request for hidden states of inner layers, beside the last hidden states.

    `layers` are numbered as in transformers: 0 is the output of the embedding, n the output of layer n, and the output
    of the last layer is normed. Without `documents` the hidden states of all tokens are returned, (rows, length,
    hidden_size). With `documents`, means over the tokens of documents 0 to documents - 1 of each row are returned:
    float32 (rows, documents, hidden_size), zeros for a document without tokens. `TokenContext.mean_weights` may mask or
    weight tokens in these means.
    """

    layers: tuple[int, ...]
    documents: int | None = None


@attrs.frozen(kw_only=True)
class BatchContext:
    """
    Context of a microbatch that every stage of a pipeline gets beside its inputs; a user's model may extend it.

    `weights`, float32, (rows,) or (rows, length) as in the batch, weights each row or token in losses inside of the
    model, such as a router's; None disables these losses, as in inference. `part` selects this rank's tokens of longer
    rows. `whole_rows` is True if each row is known to be one document that is completely on this rank. With a `cache`,
    the tokens follow the cached tokens. With `hidden_states`, each stage returns a pair: its hidden states, and a dict
    of the requested hidden states of all layers so far.
    """

    weights: Tensor | None = None
    part: RowPart | None = None
    cache: KeyValueCache | None = None
    hidden_states: HiddenStates | None = None
    whole_rows: bool = False


@attrs.frozen
class TokenContext(BatchContext):
    """
    Context of a decoder's microbatch: positions and document ids, int64 (rows, length).

    `mean_weights`, non-negative, bool or floating (rows, length), weights each token in means of hidden states;
    default: 1.
    """

    positions: Tensor
    document_ids: Tensor
    weights: Tensor | None = None
    mean_weights: Tensor | None = attrs.field(default=None, kw_only=True)


@attrs.frozen
class VocabularyPart:
    """This rank's rows of the output weight, from row `first` on; the ranks of `group` together have all rows."""

    first: int
    group: Group


class Head(Protocol):
    """
    The end of a model, from hidden states to the vocabulary, which a loss calls inside of the last stage's forward.

    A loss does not see the head's weights, which may be tied, have a bias, be capped or be split over ranks.
    """

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Return the cross entropy of each token, in nats, and the log-sum-exp of its logits, without storing all logits.

        hidden: (rows, length, hidden_size); targets: int64 (rows, length); weights: float32 (rows, length), factors of
        the losses. Both results are (rows, length), at least float32, and differentiable in hidden and in the head's
        parameters. The loss is 0 if the target is IGNORE_INDEX; the log-sum-exp is computed for all tokens.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size), in the parameters' dtype, of hidden states (..., hidden_size)."""
        ...

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """
        Return the mean of each token's logits over the vocabulary: (...), at least float32; hidden (..., hidden_size).
        """
        ...

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """
        Apply `function` to the logits of hidden (rows, length, hidden_size), chunk by chunk; return (rows, length).

        `function(logits, *parts)` gets logits (tokens, vocab_size) and the same tokens of each of `tensors`, (rows,
        length, ...), and returns one number for each token. A chunk's float32 logits take at most `max_bytes`, except
        for a single token. The backward pass recomputes logits, so that they never exist all at once.
        """
        ...


Finish = Callable[[Tensor, Head], Any]
"""
The end of a forward pass: a function of the last hidden states (rows, length, hidden_size) and the head to a tree of
tensors.

With `BatchContext.hidden_states` the first argument is a pair.
"""


class HeadLayer:
    """A layer that can be the head of a model, or be tied to it."""

    def head(self) -> Head:
        """Return a new head for each forward pass, because wrappers may replace weights."""
        raise NotImplementedError

    def finish(self, hidden: Any, finish: Finish) -> Any:
        """End a forward pass with the head. Like `forward`, it runs with gathered weights if ranks have shards."""
        return finish(hidden, self.head())


class LinearLayer:
    """A layer whose forward pass multiplies by `weight` (outputs, inputs), in the format that stages set."""

    weight: Tensor
    supports_float8: ClassVar[bool] = True
    uses_float8: bool = False


@port
class Model(Protocol):
    """
    Builder of a model's modules, which owns none of them.

    A module's `forward(inputs, shared, finish=None)` gets the loss's inputs of a batch on the first stage (token ids
    (rows, length) for a decoder) and hidden states on the others. It returns hidden states, (rows, length, hidden_size)
    for a decoder. On a span with the head these are the last hidden states, normed as logits need them; with `finish`
    the module returns `finish(hidden, head)` instead. Computation with the head's weights is then inside of this
    forward, as hooks and activation checkpointing require. The type of the head is an agreement between the module and
    the loss.

    Parameter names contain global layer numbers, so that they are equal for every partition into stages; none begins
    with `loss.`.
    """

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers, which are partitioned over stages."""
        ...

    def build(self, span: LayerRange) -> nn.Module:
        """
        Return the module of a span, with parameters on torch's default device; stages build it on the meta device.

        A submodule that owns buffers fills them in `reset_parameters()`, because they have no values on the meta
        device.
        """
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """
        Return the layers of a module that `build` made, in the order of their use.

        Each layer is a unit of blockwise work, such as gathering sharded parameters (FSDP) or activation checkpointing.
        """
        ...

    def initialise(self, name: str, parameter: Tensor, seed: int, part_of: TensorSlice | None = None) -> None:
        """
        Fill a parameter of any shape, or the slice `part_of` of a parameter, in place with its initial values.

        An element depends only on the seed, the parameter's name and the element's index; it has the same bits on every
        device and for every slice.
        """
        ...


@port
@runtime_checkable
class LanguageModel(Model, Protocol):
    """Builder of a decoder that has an equivalent in Hugging Face's libraries."""

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        ...

    @property
    def longest_text(self) -> int | None:
        """The maximum sequence length for which the model's positions are made; None if there is no limit."""
        ...

    def hugging_face_config(self) -> dict[str, Any]:
        """Return the `config.json` of the same model."""
        ...

    def hugging_face_mapper(self) -> Mapper:
        """Return the mapper from the whole model's parameters to Hugging Face's tensors; its inverse maps them back."""
        ...


@runtime_checkable
class ShapeKeepingModel(Protocol):
    """
    A model with layers that all return hidden states of the shape and dtype of their inputs.

    The first layer then determines the tensors between stages, and no other layer has to run on the meta device.
    """

    layers_keep_shapes: ClassVar[bool]


def layers_keep_shapes(model: object) -> bool:
    """Return whether all layers of a model return hidden states of the shape and dtype of their inputs."""
    return isinstance(model, ShapeKeepingModel) and model.layers_keep_shapes


@runtime_checkable
class PretrainedModel(Protocol):
    """A model that names its own initial weights."""

    @property
    def initial_weights(self) -> Path | None:
        """The folder of the initial weights, unless the recipe names another; None for random weights."""
        ...


@runtime_checkable
class ExpertModel(Protocol):
    """A model class with a known number of experts, before anything is built."""

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """Return the number of experts of a layer by a node's settings; 0 if the model has no experts."""
        ...


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model class that restricts tensor parallelism."""

    @classmethod
    def tensor_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Yield the reasons why `ranks` ranks along `tensor` can't share a node's model, as ends of a sentence."""
        ...


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model class that restricts context parallelism."""

    @classmethod
    def context_faults(cls, node: Any) -> Iterator[str]:
        """Yield the reasons why a node's model needs whole rows, as ends of a sentence."""
        ...


@runtime_checkable
class KnownModule(Protocol):
    """A model class that can build a node's whole model on the meta device, without other components."""

    @classmethod
    def module_of(cls, node: Any) -> nn.Module | None:
        """Return the whole model by a node's settings, on the meta device; None if the settings are invalid."""
        ...


def known_module(node: Any) -> nn.Module | None:
    """Return the whole model of a model's node on the meta device, if its class is a `KnownModule`."""
    return node.component.module_of(node) if issubclass(node.component, KnownModule) else None


@runtime_checkable
class BufferOwner(Protocol):
    """A module that initializes its own parameters and buffers."""

    def reset_parameters(self) -> None:
        """Fill the module's parameters and buffers in place with their initial values."""
        ...


@port
class Kernels(Protocol):
    """Operations of a model; the recipe chooses an implementation of each."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """
        Return x @ weight.T + bias: x (..., inputs), weight (outputs, inputs), bias (outputs,), result (..., outputs).
        """
        ...

    def linear_float8(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `linear` of bfloat16 tensors with products in float8, forward and backward."""
        ...

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return weight[tokens]: integer tokens (...), weight (vocabulary, width), result (..., width)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply RMSNorm over the last dimension of (..., width)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return RMSNorm of x + residual, both (..., width), and the sum."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up, of any shape, with each vector multiplied by its scale, if any."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate (rows, length, heads, head_dim) by angles (rows, length, head_dim // 2), in the halves layout."""
        ...

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        Apply RMSNorm by head, with weights (head_dim,), and then `rope` to queries and keys.

        q: (rows, length, heads, head_dim); k: (rows, length, kv_heads, head_dim); the results have the same shapes.
        """
        ...

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: RowPart | None = None,
        cache: KeyValueCache | None = None,
        whole_rows: bool = False,
    ) -> Any:
        """
        Return the mask that `attention` takes; it is made once for all layers of a microbatch.

        documents: int64 (rows, length); a token sees itself and the earlier tokens with its number, with a window at
        most `window` tokens including itself. With a `part`, `documents` are of this rank's tokens; the mask is for
        queries of these tokens and keys of whole rows, which `attention` gathers. With a cache, each row is one
        document, and its tokens also see the cached tokens; `attention` extends the cache. `whole_rows` is True if each
        row is known to be one document.
        """
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """
        Compute causal attention inside documents (flash attention, if the implementation has it).

        q: (rows, length, heads, head_dim); k and v: (rows, length, kv_heads, head_dim); mask from `attention_mask`;
        result (rows, length, heads, head_dim).
        """
        ...

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Return the loss and log-sum-exp of each token, float32 (...), for logits hidden (..., width) @ weight.T
        (vocabulary, width).

        targets: int64 (...); token_weights: float32 (...), factors of the losses. The loss is 0 if the target is
        IGNORE_INDEX. With a `part`, the weight has this rank's rows of the vocabulary, and losses are over the whole
        vocabulary.
        """
        ...
