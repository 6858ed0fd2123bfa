"""Model operations in the best implementation for the device, or in the recipe's explicit choice."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from drawloom import NodeView, Problem, between, component, setting
from drawloom.components.kernels.choosing import (
    GPU,
    OPERATIONS,
    PLAIN,
    TRITON,
    ImplementationChoice,
    choose_implementation,
    find_unavailable_reason,
    load_function,
    load_implementation,
)
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.recompute.marks import (
    RowKernels,
    accept_rounded_inputs,
    call_recomputable,
    keep_arguments_in_8_bits,
    record_recomputable_call,
    recorder,
)
from drawloom.ports import (
    IGNORE_INDEX,
    PLAIN_ATTENTION,
    AttentionOptions,
    CachedKeys,
    Device,
    Kernels,
    KeyValueCache,
    NormAndSum,
    PeerExchange,
    RowPart,
    StorageFormat,
    TokenLosses,
    VocabularyPart,
)


class Cached(NamedTuple):
    """Attention mask with a key-value cache, and the window, or None without one."""

    cache: KeyValueCache
    window: int | None


class _LazyFunctions(dict[str, Any]):
    """Functions by operation, imported at their first use, because no run needs all of them."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self.load = load

    def __missing__(self, operation: str) -> Any:
        return self.setdefault(operation, self.load(operation))


F = TypeVar("F", bound=Callable[..., Any])


def _make_method(declared: F, record: Callable[..., Any] | None = None, **settings: Any) -> F:
    """
    Return a method like the port's that runs its operation; in a pass with a recorder, `record` runs and marks it.

    torch.compile can't trace `functools.partialmethod`.
    """

    def run_operation(self: Any, *arguments: Any, **options: Any) -> Any:
        function = self._functions[declared.__name__]
        if record is None or torch.compiler.is_compiling() or recorder.get() is None:
            return function(*arguments, **options)
        return record(self, function, *arguments, **settings, **options)

    return cast(F, run_operation)


class _OperationSettings:
    """Base that declares a setting for every operation's implementation."""

    def __init_subclass__(cls) -> None:
        for name, operation in OPERATIONS.items() if _OperationSettings in cls.__bases__ else ():
            doc = f"implementation of {operation.doc}"
            setattr(cls, f"_{name}", setting(doc, default="auto", alias=name))
            cls.__annotations__[f"_{name}"] = Literal["auto", *operation.implementations]


@component(
    replaced_keys=dict.fromkeys(
        ("linear_float8", "experts_float8"), 'implementation in a table with use = "float8.training"'
    )
    | {"batch_invariant": 'use = "kernels.batch_invariant" in this table'}
)
class AutoKernels(_OperationSettings):
    """
    Model operations: `eager` is plain torch, `auto` the best implementation for the device.

    Embeddings and linear layers always use torch. `triton` compiles a kernel at its first use.
    Attention: `flex` is torch's FlexAttention, `varlen` torch's flash attention for rows of several documents, and
    `cudnn` is cuDNN for rows of one document and `flex` for others; `tree` is for completions that share their prompt.
    Cross entropy: `triton` stores the gradients of the logits, up to 2.5 GiB in bfloat16, and `cut` never stores
    logits. Grouped GEMM: `torch` is torch's grouped product.
    """

    device: Device
    filter_eps: float = setting(
        "threshold for `cut` to skip tiles with small logit gradients; 0 is exact", default=0.0, check=between(0, 1)
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Refuse implementations for GPUs if the device is the CPU."""
        if _read_device_kind(node) == "cpu":
            for operation in OPERATIONS:
                if node.settings.get(operation) in TRITON | GPU:
                    text = f"{node.settings[operation]!r} runs on GPUs, and the device is the CPU"
                    yield node.problem(operation, text, "write 'auto' or 'eager'")

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield `auto`'s implementation for every operation on the recipe's device, and the reason."""
        available = "cuda" if torch.cuda.is_available() else "cpu"
        if _read_device_kind(node) == "cuda" != available:
            yield "auto: chosen on the GPU machine; this machine has no GPU to decide by"
            return
        device = torch.device(available if _read_device_kind(node) == "auto" else _read_device_kind(node))
        for operation in OPERATIONS:
            if node.settings.get(operation) == "auto":
                chosen = choose_implementation(operation, "auto", device)
                yield f"{operation}: auto is {chosen.name}, for {chosen.why}"

    def open(self) -> None:
        """Choose the implementations. Raises UserError if the device can't run one."""
        self.list_versions_and_choices()

    def choose_implementation_of(self, operation: str) -> ImplementationChoice:
        """Return an operation's implementation and the reason for the choice."""
        return choose_implementation(operation, getattr(self, f"_{operation}"), self.device.device)

    def list_versions_and_choices(self) -> dict[str, str]:
        """Return the implementation of every operation."""
        return {operation: self.choose_implementation_of(operation).name for operation in OPERATIONS}

    def import_operations(self) -> None:
        for operation in (*OPERATIONS, *PLAIN, "norm_of_sum"):
            _ = self._functions[operation]

    @cached_property
    def _functions(self) -> dict[str, Any]:
        return _LazyFunctions(self._load_function)

    def _load_function(self, operation: str) -> Any:
        if operation in PLAIN:
            return load_function(PLAIN[operation])
        if operation == "norm_of_sum":
            # Recomputation normalises the sum that add_rms_norm made; the same implementation gives the same bits.
            return load_implementation("rms_norm", self.choose_implementation_of("add_rms_norm").name)
        return load_implementation(operation, self.choose_implementation_of(operation).name)

    def _load_row_casts(self) -> RowKernels:
        """Return the casts of saved rows to 8 bits, which only runs that keep such rows import."""
        return cast(RowKernels, import_module("drawloom.kernels.float8.linear").choose_row_casts(self.device.device))

    @cached_property
    def _batch_invariant_attention(self) -> Any:
        """
        Return the Triton module for batch-invariant attention, which also attends to cached keys.

        None on a CPU, without Triton, and for eager attention.
        """
        device = self.device.device
        is_eager = self.choose_implementation_of("attention").name == "eager"
        if is_eager or device.type == "cpu" or find_unavailable_reason("triton", device):
            return None
        return import_module("drawloom.kernels.batch_invariant.triton")

    def dequantize(self, stored: Tensor, weight_format: StorageFormat) -> Tensor:
        return weight_format.load(stored, self._functions["dequantize"])

    def linear_quantized(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, bias: Tensor | None = None
    ) -> Tensor:
        dequantize = self._functions["dequantize"]
        return self._functions["linear_quantized"](dequantize, x, stored, weight_format, bias)  # type: ignore[no-any-return]

    def _record_add_rms_norm(
        self, add_and_norm: Callable[..., NormAndSum], x: Tensor, residual: Tensor, *arguments: Any
    ) -> NormAndSum:
        with keep_arguments_in_8_bits(self._load_row_casts, x):
            normed, summed = add_and_norm(x, residual, *arguments)
            # Recomputation starts from the sum, which is saved anyway, not from its terms.
            record_recomputable_call(normed, self._functions["norm_of_sum"], summed, *arguments)
        return NormAndSum(normed, summed)

    def _record(self, function: Callable[..., Any], *arguments: Any, rounded: int = 0) -> Any:
        """
        Call a function whose result can be recomputed; its first `rounded` arguments can be kept in 8 bits.
        """
        with keep_arguments_in_8_bits(self._load_row_casts, *arguments[:rounded]) if rounded else nullcontext():
            return call_recomputable(function, *arguments)

    def _multiply_rounded(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a product whose inputs are saved for weight gradients only, and can be kept in 8 bits."""
        with accept_rounded_inputs():
            return function(*arguments, **options)

    # The port declares these operations' parameters and results.
    linear = _make_method(Kernels.linear, _multiply_rounded)
    grouped_gemm = _make_method(Kernels.grouped_gemm, _multiply_rounded)
    rms_norm = _make_method(Kernels.rms_norm, _record, rounded=1)
    add_rms_norm = _make_method(Kernels.add_rms_norm, _record_add_rms_norm)
    swiglu = _make_method(Kernels.swiglu, _record, rounded=2)
    swiglu_halves = _make_method(Kernels.swiglu_halves, _record, rounded=1)
    oss_swiglu_halves = _make_method(Kernels.oss_swiglu_halves, _record, rounded=1)
    geglu = _make_method(Kernels.geglu, _record, rounded=2)
    moe_permute = _make_method(Kernels.moe_permute, _record)
    _convolve = _make_method(Kernels.causal_conv, _record)
    _norm_and_rotate = _make_method(Kernels.qk_norm_rope, _record)
    # Not recomputable: its backward pass does not need x, so that recomputation would save no memory.
    rope = _make_method(Kernels.rope)
    embedding = _make_method(Kernels.embedding)
    choose_keys = _make_method(Kernels.choose_keys)
    sparse_attention = _make_method(Kernels.sparse_attention)
    connect_streams = _make_method(Kernels.connect_streams)
    moe_routes = _make_method(Kernels.moe_routes)
    moe_unpermute = _make_method(Kernels.moe_unpermute)
    add_expert_bias = _make_method(Kernels.add_expert_bias)

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
        if zero_centered or interleaved or 2 * cos.shape[-1] != q.shape[-1]:  # the fused kernel has none of these
            q, k = (self.rms_norm(x, w, eps, zero_centered) for x, w in ((q, q_weight), (k, k_weight)))
            return self.rope(q, cos, sin, interleaved), self.rope(k, cos, sin, interleaved)
        arguments = q, k, q_weight, k_weight, eps, cos, sin
        return self._norm_and_rotate(*arguments)

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: RowPart | None = None,
        cache: KeyValueCache | None = None,
        one_document_per_row: bool = False,
    ) -> Any:
        """
        Return the mask for `attention`, from document ids int64 (rows, length).

        The queries are all tokens, a `part` of every row, or with a cache the tokens after the cached ones.
        """
        if cache is not None:
            return Cached(cache, window)
        chosen, is_whole_row = self._functions["attention"], one_document_per_row and window is None
        if part is None:
            if is_whole_row and chosen.one_document_mask is not None:
                return chosen.one_document_mask
            return chosen.mask(documents, window)
        if is_whole_row and chosen.one_document_pieces is not None:
            return chosen.one_document_pieces(part)
        return PartMask(chosen.mask(part.gather(documents), window, part.token_indices), part)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: AttentionOptions = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(mask, PartMask):
            from drawloom.kernels.attention.pieces import gather_keys_and_values

            k, v = gather_keys_and_values(mask.part, k, v)
            mask = mask.whole
        if isinstance(mask, Cached):
            # The implementations for training require as many queries as keys.
            return self._attend_to_cached(q, mask.cache.extend(k, v), mask.window, options, sinks)
        return self._functions["attention"].attend(q, k, v, mask, options, sinks)  # type: ignore[no-any-return]

    def extend_keys(self, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        if not isinstance(mask, Cached):
            return k, v, None
        keys, values, count = mask.cache.extend(k, v)
        seen = self._functions["causal_mask"](k.shape[1], keys.shape[1], mask.window, k.device, count)
        return keys, values, seen[0]

    def _attend_to_cached(
        self, q: Tensor, cached: CachedKeys, window: int | None, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        k, v, count = cached
        if self._batch_invariant_attention is not None and q.dtype != torch.float64:
            blocks = self._batch_invariant_attention.BlockMask(None, window, key_count=count)
            return self._batch_invariant_attention.attend_in_blocks_triton(q, k, v, blocks, options, sinks)  # type: ignore[no-any-return]
        visible = self._functions["causal_mask"](q.shape[1], k.shape[1], window, q.device, count)
        return self._functions["attend_to_cached"](q, k, v, visible, options, sinks)  # type: ignore[no-any-return]

    def recurrence_mask(
        self, documents: Tensor, part: RowPart | None = None, cache: KeyValueCache | None = None
    ) -> Any:
        from drawloom.components.kernels.recurrence import create_recurrence_mask  # few models are recurrent

        return create_recurrence_mask(documents, part, cache)

    def causal_conv(self, x: Tensor, weight: Tensor, mask: Any, silu: bool = True) -> Tensor:
        return mask.convolve(self._convolve, x, weight, silu)  # type: ignore[no-any-return]

    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any) -> Tensor:
        return mask.apply_rule(self._functions["gated_delta_rule"], (q, k, v, g, beta))  # type: ignore[no-any-return]

    def state_space(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Any) -> Tensor:
        return mask.apply_rule(self._functions["state_space"], (q, k, v, g))  # type: ignore[no-any-return]

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> TokenLosses:
        """
        Return losses and log-sum-exp, float32 (...), for logits hidden (..., hidden_size) @ weight.T (vocab_size, ...).

        With a vocabulary `part`, and if the recipe chooses `cut`, logits are filtered.
        """
        cut = LogitCut(ignore_index=IGNORE_INDEX, filter_eps=self.filter_eps, part=part)
        return self._functions["linear_cross_entropy"](hidden, weight, targets, cut, token_weights)  # type: ignore[no-any-return]

    @property
    def moe_peers(self) -> PeerExchange:
        return self._functions["moe_peers"]  # type: ignore[no-any-return]

    def multiply_quantized_experts(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, offsets: Tensor
    ) -> Tensor:
        return self._functions["multiply_quantized_experts"](  # type: ignore[no-any-return]
            self._functions["dequantize"], self._functions["grouped_gemm"], x, stored, weight_format, offsets
        )


class PartMask(NamedTuple):
    """Attention mask from the queries on this rank, a `part` of every row, to the keys in whole rows."""

    whole: Any
    part: RowPart


def _read_device_kind(node: NodeView) -> str:
    """Return the recipe's device kind: auto, cpu or cuda."""
    device = node.neighbour("device")
    return str((device and device.settings.get("kind")) or "auto")
