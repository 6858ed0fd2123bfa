"""Ports for models, which build modules, and for the heads and kernels inside modules."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.graph import port
from drawloom.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.results import NormAndSum, TokenLosses
from drawloom.kernels.weight_formats import StorageFormat, WeightFormat


@attrs.frozen
class LayerRange:
    """Span of a model for one stage: layers `first` to before `last`, with or without the embedding and the head."""

    first: int
    last: int
    embedding: bool
    head: bool


class RowPart(Protocol):
    """This rank's tokens in every row, if several ranks share the rows (context parallelism)."""

    @property
    def token_indices(self) -> Tensor:
        """Indices of this rank's tokens in a row, int64 (tokens,), ascending."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Gather whole rows (rows, length, ...) from every rank's `part` (rows, tokens, ...); differentiable."""
        ...

    @property
    def piece_indices(self) -> tuple[int, ...]:
        """
        Indices of this rank's pieces; all ranks' pieces are equally long runs of tokens, counted from the row's start.
        """
        ...

    def gather_pieces(self, own: Tensor) -> Tensor:
        """
        Gather all ranks' values per piece, (rows, own pieces, ...), in the order of pieces along a row: (rows, all
        pieces, ...); differentiable.
        """
        ...


@attrs.frozen
class HiddenStates:
    """
    Request for hidden states from inner layers, beside the last hidden states.

    `layers` are numbered as in transformers: 0 is the embedding's output, n layer n's output, and the last layer's
    output is normed. Without `documents`, all tokens' hidden states are returned, (rows, length, hidden_size). With
    `documents`, means over the tokens in every row's documents 0 to documents - 1 are returned: float32 (rows,
    documents, hidden_size), zeros for a document without tokens. `TokenContext.mean_weights` may mask or weight tokens
    in these means.
    """

    layers: tuple[int, ...]
    documents: int | None = None


@attrs.frozen(kw_only=True)
class BatchContext:
    """
    Microbatch context for every pipeline stage, beside its inputs; a user's model may extend it.

    `weights`, float32, (rows,) or (rows, length) as in the batch, weights rows or tokens in losses inside the model,
    such as a router's; None disables these losses, as in inference. `part` selects this rank's tokens from longer
    rows. `one_document_per_row` is True if every row is known to be one document, completely on this rank. With a
    `cache`, the tokens follow the cached tokens. With `hidden_states`, stages return a pair: their hidden states, and a
    dict with the requested hidden states from all layers so far.
    """

    weights: Tensor | None = None
    part: RowPart | None = None
    cache: KeyValueCache | None = None
    hidden_states: HiddenStates | None = None
    one_document_per_row: bool = False


@attrs.frozen
class TokenContext(BatchContext):
    """
    Context for a decoder's microbatch: positions and document ids, int64 (rows, length).

    `mean_weights`, non-negative, bool or floating (rows, length), weights tokens in means over hidden states;
    default: 1. `padding`, bool (rows, length), is true where there is no document's token and no sum over
    tokens counts; None without padding.
    """

    positions: Tensor
    document_ids: Tensor
    weights: Tensor | None = None
    padding: Tensor | None = attrs.field(default=None, kw_only=True)
    mean_weights: Tensor | None = attrs.field(default=None, kw_only=True)


@attrs.frozen
class VocabularyPart:
    """This rank's rows in the output weight, from row `first` on; the ranks in `group` together have all rows."""

    first: int
    group: Group


class Head(Protocol):
    """
    Model head, from hidden states to the vocabulary; losses call it inside the last stage's forward.

    A loss does not see the head's weights, which may be tied, have a bias, be capped or be split over ranks.
    """

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> TokenLosses:
        """
        Compute cross entropies by token, in nats, and the log-sum-exp over logits, without storing all logits.

        hidden: (rows, length, hidden_size); targets: int64 (rows, length); weights: float32 (rows, length), loss
        factors. Both results are (rows, length), at least float32, and differentiable in hidden and in the head's
        parameters. The loss is 0 if the target is IGNORE_INDEX; the log-sum-exp is computed for all tokens.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size), in the parameters' dtype, for hidden states (..., hidden_size)."""
        ...

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """
        Average logits over the vocabulary by token: (...), at least float32; hidden (..., hidden_size).
        """
        ...

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """
        Apply `function` to the logits for hidden (rows, length, hidden_size), chunk by chunk; return (rows, length).

        `function(logits, *parts)` gets logits (tokens, vocab_size) and the same tokens from all `tensors`, (rows,
        length, ...), and returns one number per token. A chunk's float32 logits take at most `max_bytes`, except
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
    """A layer that can be a model's head, or be tied to it."""

    def head(self) -> Head:
        """Return a Head for one forward pass; FSDP and others may replace the weights between passes."""
        raise NotImplementedError

    def finish_with_head(self, hidden: Any, finish: Finish) -> Any:
        """Return `finish(hidden, head)`, computed like `forward` with gathered weights if FSDP shards the layer."""
        return finish(hidden, self.head())


class StoredLayer:
    """A layer that decodes its parameters named in `formats` from storage in these formats; features set them."""

    formats: Mapping[str, StorageFormat] = MappingProxyType({})


def list_quantized_parameter_formats(module: nn.Module) -> dict[str, WeightFormat]:
    """Return the formats of a module's quantized parameters by name."""
    return {
        f"{path}.{leaf}" if path else leaf: weight_format
        for path, layer in module.named_modules()
        if isinstance(layer, StoredLayer)
        for leaf, weight_format in layer.formats.items()
        if isinstance(weight_format, WeightFormat)
    }


class GatherEncoding(Protocol):
    """Encoding of weights in messages between FSDP ranks, from which layers compute the products of the weights."""

    itemsize: ClassVar[int]
    """Bytes of an encoded element, without scales."""

    def pack_weights(self, weights: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        """Return a message, uint8 (bytes,), with flat weights (n,); weights with a row width other than 0 encoded."""
        ...

    def unpack_weights(self, messages: Tensor, outputs: Sequence[Tensor], widths: Sequence[int]) -> None:
        """Fill outputs (ranks, n) from all ranks' messages, uint8 (ranks, bytes)."""
        ...


class LinearLayer:
    """
    A layer whose forward pass multiplies by `weight` (outputs, inputs), and calls `multiply_by_weight` for it.

    Features replace this method. FSDP gathers the parameters named in `gather_encodings` in these encodings.
    """

    gather_encodings: Mapping[str, GatherEncoding] = MappingProxyType({})
    weight: Tensor

    def multiply_by_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias (..., outputs) for x (..., inputs) and bias (outputs,)."""
        raise NotImplementedError

    def decode_weight(self, stored: Tensor) -> Tensor:
        """Return the weight (outputs, inputs) for the parameter, or for a copy; a feature may store it otherwise."""
        return stored


@port
class Model(Protocol):
    """
    Builder for a model's modules; it does not own them.

    A module's `forward(inputs, shared, finish=None)` gets the loss's inputs for a batch on the first stage (token ids
    (rows, length) for a decoder) and hidden states on the others. It returns hidden states, (rows, length, hidden_size)
    for a decoder. On a span with the head, it returns the last hidden states, normed for the head; with `finish`, it
    returns `finish(hidden, head)` instead. Computation with the head's weights is then inside this forward, as hooks
    and activation checkpointing require. The module and the loss agree on the head's type.

    Parameter names contain global layer numbers, so they are equal for every partition into stages; none begins with
    `loss.`.
    """

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, which are partitioned over stages."""
        ...

    def build(self, span: LayerRange) -> nn.Module:
        """
        Return a span's module, with parameters on torch's default device; stages build it on the meta device.

        A submodule that owns buffers fills them in `reset_parameters()`, because they have no values on the meta
        device.
        """
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """
        Return the layers in a module from `build`, in the order of use.

        Layers are units for blockwise work, such as gathering sharded parameters (FSDP) or activation checkpointing.
        """
        ...

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        """
        Fill a parameter, or the slice `tensor_slice` of a parameter, in place with its initial values.

        An element depends only on the seed, the parameter's name and the element's index, and is bitwise equal on every
        device and for every slice.
        """
        ...


@port
@runtime_checkable
class LanguageModel(Model, Protocol):
    """Builder for a decoder with an equivalent in Hugging Face's libraries."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the embedding's row count."""
        ...

    @property
    def max_sequence_length(self) -> int | None:
        """Maximum sequence length for the model's positions; None without a limit."""
        ...

    def hugging_face_config(self) -> dict[str, Any]:
        """Return the equivalent model's `config.json`, perhaps with null token ids."""
        ...

    def hugging_face_mapper(self) -> Mapper:
        """Return the mapper from the whole model's parameters to Hugging Face's tensors; its inverse maps them back."""
        ...


@runtime_checkable
class LimitedPositions(Protocol):
    """A language model whose positions may be limited."""

    @property
    def position_count(self) -> int | None:
        """Number of learned positions, a text's greatest length; None if positions are computed."""
        ...


def find_length_fault(models: Mapping[str, LanguageModel], length: int) -> str:
    """Return why a model can't compute rows of this length, with a remedy; empty if all models can."""
    for name, model in models.items():
        count = model.position_count if isinstance(model, LimitedPositions) else None
        if count is not None and length > count:
            text = f"[{name}] has a table of {count} learned positions, and a row has {length} tokens"
            return f"{text}; write a length of at most {count}, or use a model with rotary positions"
    return ""


@runtime_checkable
class KeepsConfig(Protocol):
    """A language model that may replace the one in a folder, or the text part of a larger model in a folder."""

    def build_updated_folder_config(self, path: Path, text_only: bool = False) -> dict[str, Any]:
        """
        Return the `config.json` of a folder with this language model in place of the old one.

        It is unchanged if both models are equal. With `text_only` it leaves out the other parts of a larger model.
        Raises UserError if it is not a config of the model's family.
        """
        ...

    def find_decoder_prefix(self, path: Path) -> str:
        """
        Return the prefix of the decoder's modules in the model that transformers builds for a folder's `config.json`.

        It is "model.", as in this model, or another one in a multimodal model.
        """
        ...


@runtime_checkable
class ShapeKeepingModel(Protocol):
    """
    A model with layers that keep the shape and dtype of hidden states.

    The first layer then determines the tensors between stages, and no other layer has to run on the meta device.
    """

    layers_keep_shapes: ClassVar[bool]


@runtime_checkable
class HasCostKey(Protocol):
    """A layer whose time and memory depend on more than its parameters, such as a window of attention."""

    @property
    def cost_key(self) -> Hashable:
        """Return a key: layers with equal keys and parameters of equal shapes have equal costs."""
        ...


def layers_keep_shapes(model: object) -> bool:
    """Return whether all layers keep the shape and dtype of hidden states."""
    return isinstance(model, ShapeKeepingModel) and model.layers_keep_shapes


@runtime_checkable
class PretrainedModel(Protocol):
    """A model with its own initial weights."""

    @property
    def initial_weights(self) -> Path | None:
        """Folder with the initial weights, unless the recipe names another; None for random weights."""
        ...


@runtime_checkable
class UncastParameters(Protocol):
    """A model with parameters that layers use in the parameter dtype, as if `precision.uncast` named them."""

    def uncast_parameter_patterns(self) -> Sequence[str]:
        """Return name patterns (fnmatch) for parameters without a cast to the compute dtype."""
        ...


@runtime_checkable
class ClassifiableModel(Protocol):
    """A model class with or without a sequence classifier in transformers."""

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        """Return whether AutoModelForSequenceClassification loads an export of a node's model."""
        ...


@runtime_checkable
class ExpertModel(Protocol):
    """A model class with a known number of experts, before anything is built."""

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """Return the expert count per layer from a node's settings; 0 for a model without experts."""
        ...


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model class that restricts tensor parallelism."""

    @classmethod
    def find_tensor_parallel_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Yield reasons why tensor parallelism over `ranks` ranks can't split a node's model, as ends of a sentence."""
        ...


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model class that restricts context parallelism."""

    @classmethod
    def find_context_parallel_faults(cls, node: Any) -> Iterator[str]:
        """Yield reasons, as ends of a sentence, why context parallelism can't split rows for a node's model."""
        ...


@runtime_checkable
class KnownModule(Protocol):
    """A model class that can build a node's whole model on the meta device, without other components."""

    @classmethod
    def build_meta_module(cls, node: Any) -> nn.Module | None:
        """Return the whole model on the meta device, from a node's settings; None if the settings are invalid."""
        ...


def build_meta_module_if_known(node: Any) -> nn.Module | None:
    """Return the whole model of a model's node on the meta device, if its class is a `KnownModule`."""
    return node.component.build_meta_module(node) if issubclass(node.component, KnownModule) else None


@runtime_checkable
class BufferOwner(Protocol):
    """A module that initializes its own parameters and buffers."""

    def reset_parameters(self) -> None:
        """Fill the module's parameters and buffers in place with their initial values."""
        ...


@runtime_checkable
class BatchInvariant(Protocol):
    """Kernels by which a token has the same bits in every batch, at every length and with a cache."""

    batch_invariant: ClassVar[bool]


@port
class Kernels(Protocol):
    """Model operations; the recipe chooses their implementations."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """
        Return x @ weight.T + bias: x (..., inputs), weight (outputs, inputs), bias (outputs,), result (..., outputs).
        """
        ...

    def dequantize(self, stored: Tensor, weight_format: StorageFormat) -> Tensor:
        """Return the weight, bfloat16 (..., outputs, inputs), with storage (..., outputs, units)."""
        ...

    def linear_quantized(
        self,
        x: Tensor,
        stored: Tensor,
        weight_format: StorageFormat,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute `linear` of bfloat16 x with a frozen weight, given as its storage (outputs, units)."""
        ...

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return weight[tokens]: integer tokens (...), weight (vocabulary, width), result (..., width)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        """Apply RMSNorm over the last dimension of (..., width); if `zero_centered`, the factor is 1 + weight."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
    ) -> NormAndSum:
        """Return `rms_norm` of x + residual, both (..., width), and the sum."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up, any shape, with vectors multiplied by their scale, if any."""
        ...

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return gelu(gate) * up, of any shape, with the tanh approximation of GELU."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """
        Rotate the first 2 * pairs channels of (rows, length, heads, head_dim) by angles (rows, length, pairs).

        Channel i is paired with channel i + pairs, or, if `interleaved`, channel 2 i with 2 i + 1.
        """
        ...

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        zero_centered: bool = False,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """
        Apply `rms_norm` by head, with weights (head_dim,), and then `rope` to queries and keys.

        q: (rows, length, heads, head_dim); k: (rows, length, kv_heads, head_dim); the results have the same shapes.
        """
        ...

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: RowPart | None = None,
        cache: KeyValueCache | None = None,
        one_document_per_row: bool = False,
    ) -> Any:
        """
        Return the mask for `attention`, made once for all layers in a microbatch.

        documents: int64 (rows, length); a token sees itself and earlier tokens with its number, with a window at most
        `window` tokens including itself. With a `part`, `documents` covers this rank's tokens; the mask is for their
        queries and for whole rows' keys, which `attention` gathers. With a cache, every row is one document, and its
        tokens also see the cached tokens; `attention` extends the cache. `one_document_per_row` is True if every row is
        known to be one document.
        """
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: AttentionOptions = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """
        Compute causal attention inside documents (flash attention, if the implementation has it).

        q: (rows, length, heads, head_dim); k: (rows, length, kv_heads, head_dim); v: (rows, length, kv_heads, v_dim);
        mask from `attention_mask`; result (rows, length, heads, v_dim). `sinks` (heads,) are scores for one more
        key, whose value is 0.
        """
        ...

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> TokenLosses:
        """
        Return losses and log-sum-exps by token, float32 (...), for logits hidden (..., width) @ weight.T
        (vocabulary, width).

        targets: int64 (...); token_weights: float32 (...), loss factors. The loss is 0 if the target is
        IGNORE_INDEX. With a `part`, the weight has this rank's vocabulary rows, and losses are over the whole
        vocabulary.
        """
        ...
