"""Ports for models, which build modules, for the heads inside modules, caches for keys and values, and FLOPs."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from drawloom import port
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.kernels.results import RowPart, TokenLosses

Settings = Mapping[str, Any]
"""Settings, or values of a config.json, by name."""

ConfigJson = dict[str, Any]
"""The content of a Hugging Face config.json."""


@attrs.frozen
class ForwardFlops:
    """
    Floating-point operations for matrix products in a forward pass; a multiply-add counts as two.

    `by_parameter` has the operations for one token by parameter; for experts, only those that the token visits.
    `per_pair` has the attention operations per query and visible key, by layer window; the key None is for layers
    without a window. `per_token` are other operations for one token, such as products with the states of recurrent
    layers.
    """

    by_parameter: Mapping[str, float]
    per_pair: Mapping[int | None, float]
    per_token: float = 0.0

    def count_training_flops(
        self, tokens: float, pairs: Mapping[int | None, float], frozen: Collection[str] = ()
    ) -> float:
        """
        Return the operations in a forward and a backward pass over `tokens` tokens and `pairs` attended pairs by
        window.

        A backward pass has two products per forward product, or one if the parameter is frozen.
        Activation checkpointing's recomputation does not count (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311,
        appendix B).
        """
        products = sum(flops * (2 if name in frozen else 3) for name, flops in self.by_parameter.items())
        attention = sum(flops * pairs[window] for window, flops in self.per_pair.items())
        return tokens * (products + 3 * self.per_token) + 3 * attention


@port
class CountsFlops(Protocol):
    """A model that counts its floating-point operations."""

    def forward_flops(self, span: "LayerRange | None" = None) -> ForwardFlops:
        """Return the operations in a span's forward pass; default: in the whole model's, including its head."""


@runtime_checkable
class LayeredLoss(Protocol):
    """A trainable loss with layers like the model's, which count in FLOPs and are in the model's folders."""

    def count_forward_flops(self, model: CountsFlops) -> ForwardFlops:
        """Return the operations in the forward passes of the model and the layers."""

    def extend_export(self, mapper: Mapper, config: ConfigJson) -> Mapper:
        """Return a folder's mapper, with parameters as inputs, and the layers'; set the layers' keys in the config."""


def count_flops_with_loss(model: CountsFlops, loss: object) -> ForwardFlops:
    """Return the operations in a forward pass of the model and the loss's layers."""
    return loss.count_forward_flops(model) if isinstance(loss, LayeredLoss) else model.forward_flops()


@runtime_checkable
class UpdateFlops(Protocol):
    """An optimizer with matrix products in its update."""

    def count_update_flops(self) -> float:
        """Return the floating-point operations per update on this rank, in bfloat16; works before `open`."""


@runtime_checkable
class UpdateArithmetic(Protocol):
    """An optimizer whose update takes longer than its memory traffic."""

    def count_elementwise_flops_per_update(self) -> float:
        """Return the float32 operations per update on this rank, without matrix products; works before `open`."""


class CachedKeys(NamedTuple):
    """
    A layer's keys (rows, keys, kv_heads, head_dim) and values (rows, keys, kv_heads, v_dim), with the new tokens' last.

    With `key_count`, int64 () on their device, they have `capacity` entries; only the first `key_count` are tokens.
    """

    keys: Tensor
    values: Tensor
    key_count: Tensor | None = None


class KeyValueCache:
    """
    Keys and values for all earlier tokens, by layer on this rank, for rows that contain one document.

    The BatchContext for a pass over new tokens, with positions from `length` on, contains the cache. A model passes it
    to `Kernels.attention_mask`; every layer's `Kernels.attention` then extends it, always in the first pass's layer
    order. Recurrent operations keep their states instead, also in order. `end_pass` ends a pass. A pass between
    `begin_fixed_pass` and `end_pass` can be recorded as a CUDA graph.
    """

    # Not an attrs class: a forward pass walks the trees of its inputs, in which a cache must be a leaf.
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.next_layer = 0
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._bounds: Tensor | None = None  # this pass's position and its count of tokens, for fixed passes
        self._is_fixed = False
        self._states: list[Tensor | None] = []
        self._next_state = 0

    @property
    def cached_layer_count(self) -> int:
        """Number of layers and recurrent operations with cached tensors; 0 if the model does not use a cache."""
        return len(self._layers) + len(self._states)

    @property
    def has_states(self) -> bool:
        """Whether a recurrent operation has a state."""
        return bool(self._states)

    def begin_fixed_pass(self, device: torch.device) -> None:
        """
        Begin a pass over one new token per row; all such passes have the same shapes and addresses on `device`.

        Raises ValueError if the cache is full, or if there was no pass before.
        """
        if not self._layers or self.length == self.capacity:
            raise ValueError(f"no token can follow {self.length} cached tokens with a capacity of {self.capacity}")
        if self._bounds is None:
            self._bounds = torch.empty(2, dtype=torch.int64, device=device)
        self._bounds[0].fill_(self.length)
        self._bounds[1].fill_(self.length + 1)
        self._is_fixed = True

    def extend(self, k: Tensor, v: Tensor) -> CachedKeys:
        """
        Append new tokens' keys and values for the next layer, and return all its keys and values.

        k (rows, new, kv_heads, head_dim), v (rows, new, kv_heads, v_dim). Raises ValueError for more than `capacity`
        tokens.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        if self.next_layer == len(self._layers):
            # Zeros, because a fixed pass multiplies values behind the last token by weights of 0.
            new = [x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in (k, v)]
            self._layers.append((new[0], new[1]))
        keys, values = self._layers[self.next_layer]
        self.next_layer += 1
        if self._is_fixed and self._bounds is not None:
            keys.index_copy_(1, self._bounds[:1], k)
            values.index_copy_(1, self._bounds[:1], v)
            return CachedKeys(keys, values, self._bounds[1])
        keys[:, self.length : end], values[:, self.length : end] = k, v
        return CachedKeys(keys[:, :end], values[:, :end])

    def read_next_state(self) -> Tensor | None:
        """
        Return the state (any shape) that the next recurrent operation had after earlier tokens; None in the first pass.
        """
        if self._next_state == len(self._states):
            self._states.append(None)
        self._next_state += 1
        return self._states[self._next_state - 1]

    def replace_last_read_state(self, state: Tensor) -> None:
        """Store a state (any shape) for the operation whose `read_next_state` was last."""
        self._states[self._next_state - 1] = state

    def end_pass(self, tokens: int) -> None:
        """End a forward pass over `tokens` new tokens: the next `extend` is for the first layer again."""
        self.length += tokens
        self.next_layer = self._next_state = 0
        self._is_fixed = False


@attrs.frozen
class LayerRange:
    """Span of a model for one stage: layers `first` to before `last`, with or without the embedding and the head."""

    first: int
    last: int
    embedding: bool
    head: bool

    @classmethod
    def of_whole_model(cls, layers: int) -> "LayerRange":
        """Return all layers, with the embedding and the head."""
        return cls(0, layers, embedding=True, head=True)


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
    rows. `one_document_per_row` is True if every whole row is known to be one document. With a `cache`, the tokens
    follow the cached tokens. With `hidden_states`, stages return a pair: their hidden states, and a dict with the
    requested hidden states from all layers so far.
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

        hidden: (rows, length, hidden_size); targets: int64 (rows, length); weights: float32 (rows, length), factors by
        which the losses are multiplied. Both results are (rows, length), at least float32, and differentiable in hidden
        and in the head's parameters. The loss is 0 if the target is IGNORE_INDEX; the log-sum-exp is computed for all
        tokens, without weights.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size), in the parameters' dtype, for hidden states (..., hidden_size)."""

    def mean_logits(self, hidden: Tensor) -> Tensor:
        """
        Average logits over the vocabulary by token: (...), at least float32; hidden (..., hidden_size).
        """

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 2**28
    ) -> Tensor:
        """
        Apply `function` to the logits for hidden (rows, length, hidden_size), chunk by chunk; return (rows, length).

        `function(logits, *parts)` gets logits (tokens, vocab_size) and the same tokens from all `tensors`, (rows,
        length, ...), and returns one number per token. A chunk's float32 logits take at most `max_bytes`, except
        for a single token. The backward pass recomputes logits, so that they never exist all at once.
        """


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


class StorageFormat(Protocol):
    """Storage format for a frozen weight."""

    def load(self, stored: Tensor, dequantize: Callable[[Tensor, str], Tensor]) -> Tensor:
        """
        Return the weight on the device from its storage, which may be elsewhere; `dequantize` gets the format's name.
        """


@runtime_checkable
class QuantizedFormat(StorageFormat, Protocol):
    """Format with few bits per element."""

    @property
    def name(self) -> str:
        """The format's name."""

    def weight_shape(self, storage: tuple[int, ...]) -> tuple[int, ...]:
        """Return the weight's shape for a storage shape."""

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the storage (..., outputs, units) for a floating-point weight (..., outputs, inputs)."""


class StoredLayer:
    """A layer that decodes its parameters named in `formats` from storage in these formats; features set them."""

    formats: Mapping[str, StorageFormat] = MappingProxyType({})


def list_quantized_parameter_formats(module: nn.Module) -> dict[str, QuantizedFormat]:
    """Return the formats of a module's quantized parameters by name."""
    return {
        f"{path}.{leaf}" if path else leaf: weight_format
        for path, layer in module.named_modules()
        if isinstance(layer, StoredLayer)
        for leaf, weight_format in layer.formats.items()
        if isinstance(weight_format, QuantizedFormat)
    }


class GatherEncoding(Protocol):
    """Encoding of weights in messages between FSDP ranks, from which layers compute the products of the weights."""

    itemsize: ClassVar[int]
    """Bytes of an encoded element, without scales."""

    def pack_weights(self, weights: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        """Return a message, uint8 (bytes,), with flat weights (n,); weights with a row width other than 0 encoded."""

    def unpack_weights(self, messages: Tensor, outputs: Sequence[Tensor], widths: Sequence[int]) -> None:
        """Fill outputs (ranks, n) from all ranks' messages, uint8 (ranks, bytes)."""


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

    def build(self, span: LayerRange) -> nn.Module:
        """
        Return a span's module, with parameters on torch's default device; stages build it on the meta device.

        A submodule that owns buffers fills them in `reset_parameters()`, because they have no values on the meta
        device.
        """

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """
        Return the layers in a module from `build`, in the order of use.

        Layers are units for blockwise work, such as gathering sharded parameters (FSDP) or activation checkpointing.
        """

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        """
        Fill a parameter, or the slice `tensor_slice` of a parameter, in place with its initial values.

        An element depends only on the seed, the parameter's name and the element's index, and is bitwise equal on every
        device and for every slice.
        """


@port
@runtime_checkable
class LanguageModel(Model, Protocol):
    """Builder for a decoder with an equivalent in Hugging Face's libraries."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the embedding's row count."""

    @property
    def max_sequence_length(self) -> int | None:
        """Maximum sequence length for the model's positions; None without a limit."""

    def hugging_face_config(self) -> dict[str, Any]:
        """Return the equivalent model's `config.json`, perhaps with null token ids."""

    def hugging_face_mapper(self) -> Mapper:
        """Return the mapper from the whole model's parameters to Hugging Face's tensors; its inverse maps them back."""


@runtime_checkable
class HasTransformersModules(Protocol):
    """A language model with other names or forms in transformers' modules than in files."""

    def transformers_mapper(self, folder: Path | None) -> Mapper:
        """
        Return the mapper from the whole model's parameters to the parameters of transformers' modules.

        It maps to modules for a folder's `config.json`, perhaps of a multimodal model; None: for the model's own.
        """


@runtime_checkable
class LimitedPositions(Protocol):
    """A language model whose positions may be limited."""

    @property
    def position_count(self) -> int | None:
        """Number of learned positions, a text's greatest length; None if positions are computed."""


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
        """
        Return a key: layers with equal keys and parameters of equal shapes have equal costs. None: the layer can't run
        alone, as it reads tensors of earlier layers.
        """


def layers_keep_shapes(model: object) -> bool:
    """Return whether all layers keep the shape and dtype of hidden states."""
    return isinstance(model, ShapeKeepingModel) and model.layers_keep_shapes


@runtime_checkable
class PretrainedModel(Protocol):
    """A model with its own initial weights."""

    @property
    def initial_weights(self) -> Path | None:
        """Folder with the initial weights, unless the recipe names another; None for random weights."""


@runtime_checkable
class UncastParameters(Protocol):
    """A model with parameters that layers use in the parameter dtype, as if `precision.uncast` named them."""

    def uncast_parameter_patterns(self) -> Sequence[str]:
        """Return name patterns (fnmatch) for parameters without a cast to the compute dtype."""


@runtime_checkable
class ClassifiableModel(Protocol):
    """A model class with or without a sequence classifier in transformers."""

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        """Return whether AutoModelForSequenceClassification loads an export of a node's model."""


@runtime_checkable
class ModelWithoutExport(Protocol):
    """A model class that can't be exported."""

    @classmethod
    def explain_missing_export(cls, node: Any) -> str:
        """Return why a node's model can't be exported, as the end of a sentence."""


@runtime_checkable
class ExpertModel(Protocol):
    """A model class with a known number of experts, before anything is built."""

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """Return the expert count per layer from a node's settings; 0 for a model without experts."""


@runtime_checkable
class SplitModel(Protocol):
    """A model class that restricts how ranks split it."""

    @classmethod
    def find_split_faults(cls, node: Any, dimension: str, ranks: int) -> Iterator[str]:
        """
        Yield reasons, as ends of a sentence, why `ranks` ranks (or stages) along a mesh's dimension can't split a
        node's model: its products along `tensor`, rows along `context`, layers along `pipeline`.
        """


@runtime_checkable
class KnownModule(Protocol):
    """A model class that can build a node's whole model on the meta device, without other components."""

    @classmethod
    def build_meta_module(cls, node: Any) -> nn.Module | None:
        """Return the whole model on the meta device, from a node's settings; None if the settings are invalid."""


def build_meta_module_if_known(node: Any) -> nn.Module | None:
    """Return the whole model of a model's node on the meta device, if its class is a `KnownModule`."""
    return node.component.build_meta_module(node) if issubclass(node.component, KnownModule) else None


@runtime_checkable
class BufferOwner(Protocol):
    """A module that initializes its own parameters and buffers."""

    def reset_parameters(self) -> None:
        """Fill the module's parameters and buffers in place with their initial values."""
