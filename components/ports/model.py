"""Models that build their modules, and the heads and kernels that these compute with."""

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
    """The part of a model that one stage holds: layers `first` up to `last`, with or without either end."""

    first: int
    last: int
    embedding: bool
    head: bool


class RowPart(Protocol):
    """The tokens that this rank has of each row, where ranks share rows out."""

    @property
    def places(self) -> Tensor:
        """The numbers of these tokens in the row, int64 (tokens,), ascending."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The whole rows (rows, length, ...) from every rank's part (rows, tokens, ...), differentiable."""
        ...


@attrs.frozen
class HiddenStates:
    """
    Which hidden states a forward pass gives besides the last ones, and in which form.

    `layers` are numbered as in transformers: 0 is what the embedding gives, n what layer n does, and the last one's are
    normed. They are those of all tokens, (rows, length, hidden_size), or with `documents` means over the tokens of
    documents 0 to documents - 1 of each row: float32 (rows, documents, hidden_size), zeros for one without a token.
    `TokenContext.mean_weights` may mask tokens, or weight them, in these means.
    """

    layers: tuple[int, ...]
    documents: int | None = None


@attrs.frozen(kw_only=True)
class BatchContext:
    """
    What every stage of a pipeline sees of a microbatch besides its inputs; a model of one's own may extend it.

    `weights`, float32, (rows,) or (rows, length) as in the batch, says how much each row or token counts for losses
    inside of the model, such as a router's; without them there are none, as in inference. `part` says which tokens of
    longer rows these are; `whole_rows`, that each row is known to be one document, all of which is here. With a
    `cache`, the tokens follow those that it holds. With `hidden_states`, what each stage gives is a pair of its hidden
    states and a dict of those that are asked for, by layer, up to here.
    """

    weights: Tensor | None = None
    part: RowPart | None = None
    cache: KeyValueCache | None = None
    hidden_states: HiddenStates | None = None
    whole_rows: bool = False


@attrs.frozen
class TokenContext(BatchContext):
    """
    What the stages of a decoder see of a microbatch: positions and document ids, int64 (rows, length).

    `mean_weights`, bool or floating (rows, length), 0 and more, is the weight of each token in means of hidden states:
    1 if left out.
    """

    positions: Tensor
    document_ids: Tensor
    weights: Tensor | None = None
    mean_weights: Tensor | None = attrs.field(default=None, kw_only=True)


@attrs.frozen
class VocabularyPart:
    """The rows of the output weight that this rank has: those from `first` on; the ranks of the group have all rows."""

    first: int
    group: Group


class Head(Protocol):
    """
    The end of a model, from hidden states to the vocabulary, as a loss uses it inside of the last stage's forward.

    A loss does not see its weights, which may be tied, have a bias, be capped or be split over ranks.
    """

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        The cross entropy of each token, in nats, and the log-sum-exp of its logits, without holding all logits.

        hidden: (rows, length, hidden_size); targets: int64 (rows, length); weights: float32 (rows, length), by which
        losses are multiplied. Both results are (rows, length), at least float32, and differentiable in hidden and in
        the head's parameters. A loss is 0 where the target is IGNORE_INDEX; lse is that of the logits everywhere.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits (..., vocab_size), in the parameters' dtype, of some hidden states (..., hidden_size)."""
        ...

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """The mean of each token's logits over the vocabulary: (...), at least float32; hidden (..., hidden_size)."""
        ...

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """
        What `function` makes of the logits, chunk by chunk: (rows, length) of hidden (rows, length, hidden_size).

        `function(logits, *parts)` takes logits (tokens, vocab_size) and the same tokens of each of `tensors`, (rows,
        length, ...), and gives one number for each token. A chunk's logits take at most `max_bytes` as float32, or are
        those of one token; for the backward pass they are computed again, so that at no time all exist.
        """
        ...


Finish = Callable[[Tensor, Head], Any]
"""
Ends a forward pass: from the last hidden states (rows, length, hidden_size) and the head to a tree of tensors.

With `BatchContext.hidden_states` the first of these is a pair.
"""


class HeadLayer:
    """A layer that can be the head of a model, or be tied to it."""

    def head(self) -> Head:
        """The head, made anew for each forward: wrappers may replace weights."""
        raise NotImplementedError

    def finish(self, hidden: Any, finish: Finish) -> Any:
        """End a forward pass with the head. Like `forward`, it runs with whole weights where ranks have shards."""
        return finish(hidden, self.head())


@port
class Model(Protocol):
    """
    Builds the modules of a model, and holds none.

    A module's `forward(inputs, shared, finish=None)` takes the inputs that the loss makes of a batch on the first
    stage, of a decoder token ids (rows, length), and hidden states on the others, and gives hidden states, of a decoder
    (rows, length, hidden_size). On a span with the head these are the last ones, normed as logits need them, and with
    `finish` the module gives `finish(hidden, head)` instead: what it computes with the head's weights is then inside of
    this forward, where hooks and recomputation expect it. Which head a module hands to the loss is between the two.
    Parameter names hold global layer numbers, so that they are the same however the layers are split; none begins with
    `loss.`.
    """

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers, which are partitioned over stages."""
        ...

    def build(self, span: LayerRange) -> nn.Module:
        """
        The module of a span, with parameters on torch's default device, which for stages is the meta device.

        A submodule that owns buffers fills them in `reset_parameters()`: on the meta device they have no values.
        """
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """
        The layers of a module that `build` made, in the order of their use.

        Each is a unit of what is done piece by piece, such as gathering sharded parameters.
        """
        ...

    def initialise(self, name: str, parameter: Tensor, seed: int, part_of: TensorSlice | None = None) -> None:
        """
        Fill a parameter of any shape, or the slice `part_of` of one, in place with its initial values.

        Each element is a function of the seed, the parameter's name and the element's index, with the same bits on
        every device and for every slice.
        """
        ...


@port
@runtime_checkable
class LanguageModel(Model, Protocol):
    """Builds the modules of a decoder, which Hugging Face's libraries know, too."""

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        ...

    @property
    def longest_text(self) -> int | None:
        """The most tokens of a text that the model's positions are made for; None if there is no limit."""
        ...

    def hugging_face_config(self) -> dict[str, Any]:
        """The `config.json` of the same model."""
        ...

    def hugging_face_mapper(self) -> Mapper:
        """Maps the whole model's parameters to Hugging Face's tensors; its inverse maps these to the parameters."""
        ...


@runtime_checkable
class ShapeKeepingModel(Protocol):
    """
    A model whose layers all return hidden states of the shape and dtype that they take.

    The tensors between stages then follow from its first layer, and the other layers need not run on the meta device.
    """

    layers_keep_shapes: ClassVar[bool]


def layers_keep_shapes(model: object) -> bool:
    """Return whether all layers of a model return hidden states of the shape and dtype that they take."""
    return isinstance(model, ShapeKeepingModel) and model.layers_keep_shapes


@runtime_checkable
class PretrainedModel(Protocol):
    """A model with weights of its own."""

    @property
    def initial_weights(self) -> Path | None:
        """The folder of the weights to start from, unless the recipe names another; None for random weights."""
        ...


@runtime_checkable
class ExpertModel(Protocol):
    """A model class with a known number of experts, before anything is built."""

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """Return the number of experts of a layer by the settings of a node; 0 if the model has no experts."""
        ...


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model class with conditions on the number of ranks along `tensor`, which share its matrix products."""

    @classmethod
    def tensor_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Yield the reasons why ranks along `tensor` can't share the model of a node, as ends of a sentence."""
        ...


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model class with conditions on ranks along `context`, which share rows out."""

    @classmethod
    def context_faults(cls, node: Any) -> Iterator[str]:
        """Yield the reasons why the model of a node needs whole rows, as ends of a sentence."""
        ...


@runtime_checkable
class KnownParameters(Protocol):
    """A model class with known parameters, before anything is built."""

    @classmethod
    def parameters_of(cls, node: Any) -> dict[str, nn.Parameter]:
        """Return all parameters by name, on the meta device, by the settings of a node; {} if these are invalid."""
        ...


@runtime_checkable
class BufferOwner(Protocol):
    """A module with initial values of its own for its parameters and buffers."""

    def reset_parameters(self) -> None:
        """Fill them in place with their initial values."""
        ...


@port
class Kernels(Protocol):
    """The operations that a model computes with; which implementation of each is the recipe's choice."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: x (..., inputs), weight (outputs, inputs), bias (outputs,); gives (..., outputs)."""
        ...

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """weight[tokens]: integer tokens (...), weight (vocabulary, width); gives (..., width)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension of (..., width)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm of x + residual, both (..., width), and the sum itself."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
        """silu(gate) * up, any shape, each vector times its scale if there is one."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate (rows, length, heads, head_dim) by angles (rows, length, head_dim // 2), halves layout."""
        ...

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        RMSNorm by head, each with its weight (head_dim,), and then `rope`, of queries and keys.

        q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), and such results.
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
        Which tokens see which, in the form that `attention` takes; made once for all layers that see a microbatch.

        documents int64 (rows, length): a token sees itself and those before it that have its number; with a window
        `window` tokens at most, itself included. With a `part`, documents are those of its tokens, and the mask is for
        them as queries and for the keys of whole rows, which `attention` gathers. With a cache, rows are of one
        document, of which a token sees what the cache holds, too; `attention` extends it. `whole_rows` says that each
        row is known to be one document.
        """
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """
        Causal attention inside documents.

        q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask from `attention_mask`; gives
        (rows, length, heads, head_dim).
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
        Losses and log-sum-exp by token, float32 (...), of the logits hidden (..., width) @ weight.T (vocabulary,
        width).

        targets int64 (...); token_weights float32 (...), by which losses are multiplied. A loss is 0 where the target
        is IGNORE_INDEX. With a `part`, the weight has some words of the vocabulary, other ranks the others, and losses
        are those of all words.
        """
        ...
