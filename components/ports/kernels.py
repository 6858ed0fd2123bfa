"""Port for a model's operations on tensors, whose implementations the recipe chooses."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from drawloom import port
from drawloom.components.ports.model import KeyValueCache, StorageFormat, VocabularyPart
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.results import NormAndSum, PermutedRows, Routes, RowPart, TokenLosses

PeerTensors = tuple[Sequence[Tensor], Tensor]
"""One tensor for each rank of a group, in rank order, of equal shape and dtype; and int64 (ranks,), their addresses."""


class PeerExchange(Protocol):
    """
    Token copies and sums in several ranks' memory, without gradients.

    All ranks have equally many token slots. Tokens are numbered by rank, then by slot.
    """

    def write_tokens_to_slots(self, values: Sequence[Tensor], own_slots: Sequence[Tensor]) -> None:
        """
        Copy this rank's tokens into its memory that the other ranks read.

        values: hidden states (tokens, width), and optionally scalars and choices (tokens, top_k); own_slots: the same
        tensors in this rank's memory, (slots, ...). Unused slots get choice -1.
        """

    def limit_routes_and_flag_overflow(
        self, routes: Routes, row_limit: int, peak_rows: Tensor
    ) -> tuple[Routes, Tensor]:
        """
        Return routes to at most `row_limit` rows, without the excess choices, and a flag, float32 (1,): NaN if choices
        were dropped, else 0.

        peak_rows: int32 (1,), the maximum number of rows before the limit; it is updated in place.
        """

    def localize_choices(self, chosen: PeerTensors, first: int, experts: int) -> Tensor:
        """
        Renumber all ranks' choices from 0 for this rank's experts, `first` to before `first + experts`; other choices
        become -1: int32 (ranks * slots, top_k).

        chosen: int32 (slots, top_k) on every rank, -1 in unused slots.
        """

    def read_rows_and_scalars(
        self, tokens: PeerTensors, scalars: PeerTensors | None, routes: Routes
    ) -> tuple[Tensor, Tensor | None]:
        """
        Copy tokens from all ranks' memory to the rows of this rank's experts: (rows, width), with scalars (rows,).

        tokens: (slots, width) on every rank; scalars: (slots, top_k) on every rank. `routes` determines the row count;
        unused rows have undefined contents.
        """

    def publish_token_sums(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """
        Sum this rank's expert rows (rows, width) by token into `sums` (tokens, width), for
        `read_token_sums_and_scalars` on the tokens' ranks, and write scalars (rows,) by choice to by_choice (tokens,
        top_k).

        dest_row: int32 (tokens, top_k), a choice's row.
        """

    def read_token_sums_and_scalars(
        self, staged: PeerTensors, by_choice: PeerTensors | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """
        Add up the sums that `publish_token_sums` left on the experts' ranks for this rank's tokens, (tokens, width);
        return them and the scalars by choice, (tokens, top_k).

        staged: (ranks * slots, width) on every rank, with this rank's tokens from row `first` on; by_choice: (ranks *
        slots, top_k) on every rank; chosen: integers (tokens, top_k), -1 for dropped choices. Every rank has `experts`
        experts.
        """


@runtime_checkable
class BatchInvariant(Protocol):
    """Kernels by which a token has the same bits in every batch, at every length and with a cache."""

    batch_invariant: ClassVar[bool]


@port
class Kernels(Protocol):
    """
    Model operations; the recipe chooses their implementations.

    Operations for models with experts (MoE) work on rows: token copies, one per expert choice, sorted by expert.
    `routes` are three tensors: rows by choice, int32 (tokens, top_k); choices by row, int32 (tokens * top_k,); and row
    ends by expert, int32 (experts,). Dropped choices have no row, and rows past the last end have undefined contents.
    The second tensor may be cut off past the last end; its length is the number of rows that operations return.

    The states of recurrent operations start at zero in every document.
    """

    def import_operations(self) -> None:
        """Import all operations, whose modules are imported at their first use: torch.compile can't follow imports."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """
        Return x @ weight.T + bias: x (..., inputs), weight (outputs, inputs), bias (outputs,), result (..., outputs).
        """

    def dequantize(self, stored: Tensor, weight_format: StorageFormat) -> Tensor:
        """Return the weight, bfloat16 (..., outputs, inputs), with storage (..., outputs, units)."""

    def linear_quantized(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, bias: Tensor | None = None
    ) -> Tensor:
        """Compute `linear` of bfloat16 x with a frozen weight, given as its storage (outputs, units)."""

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return weight[tokens]: integer tokens (...), weight (vocabulary, width), result (..., width)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        """Apply RMSNorm over the last dimension of (..., width); if `zero_centered`, the factor is 1 + weight."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
    ) -> NormAndSum:
        """Return `rms_norm` of x + residual, both (..., width), and the sum."""

    def swiglu(self, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up, any shape, with vectors multiplied by their scale, if any."""

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return gelu(gate) * up, of any shape, with the tanh approximation of GELU."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """
        Rotate the first 2 * pairs channels of (rows, length, heads, head_dim) by angles (rows, length, pairs).

        Channel i is paired with channel i + pairs, or, if `interleaved`, channel 2 i with 2 i + 1.
        """

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

    def extend_keys(self, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        Return keys and values behind the cached ones, and the keys visible to the new tokens: bool (1, new, keys).

        For attention outside of `attention`, which extends a cache itself. Without a cache the third is None.
        """

    def choose_keys(
        self, queries: Tensor, keys: Tensor, factors: Tensor, first_key: Tensor, visible_counts: Tensor, chosen: int
    ) -> tuple[Tensor, Tensor]:
        """
        Choose the `chosen` visible keys with the best scores for each token.

        queries: (rows, length, heads, width); keys: (rows, keys, width); factors: (rows, length, heads). A score is the
        sum over heads of factor * relu(query . key). A token sees `visible_counts` keys from the index `first_key` on,
        both int32 (rows, length): token i none after the key keys - length + i, so an implementation may skip later
        keys. The choice, int32 (rows, length, chosen), has indices of keys, followed by -1 if fewer are visible. The
        scores have its shape, in at least float32, and are -inf where the choice is -1.
        """
        ...

    def sparse_attention(
        self, q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """
        Compute attention to the chosen latents, which all heads share; a latent's value is its first channels.

        q: (rows, length, heads, width); latents: (rows, keys, width); result (rows, length, heads, value_width). The
        second result are the weights summed over heads, at least float32 (rows, length, chosen), without gradients.
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

        targets: int64 (...); token_weights: float32 (...), loss factors without a gradient. The loss is 0 if the target
        is IGNORE_INDEX. With a `part`, the weight has this rank's vocabulary rows, and losses are over the whole
        vocabulary.
        """

    def swiglu_halves(self, gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """Apply `swiglu` to both halves of (..., 2 * width); result (..., width)."""

    def oss_swiglu_halves(self, gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
        """
        Return (up + 1) * gate * sigmoid(alpha * gate) for the halves of (..., 2 * width), with `swiglu`'s scale.

        The gate is at most `limit`, and up is between -limit and limit; the result is (..., width).
        """

    def moe_routes(self, expert_indices: Tensor, num_experts: int) -> Routes:
        """Return routes for integers (tokens, top_k) from 0 to num_experts - 1, or -1 for dropped choices."""

    def moe_permute(self, x: Tensor, probabilities: Tensor, routes: Routes) -> PermutedRows:
        """Copy x (tokens, width) and probabilities (tokens, top_k) to rows by expert, (rows, width) and (rows,)."""

    def moe_unpermute(self, rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
        """Sum rows by token, multiplied by their probabilities if any: (tokens, width)."""

    @property
    def moe_peers(self) -> PeerExchange:
        """Kernels for expert parallelism that read tokens and sums directly from other ranks' memory."""

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
        """
        Multiply rows x (rows, inputs) by their expert's matrix in (experts, inputs, outputs), or its transpose.
        """

    def add_expert_bias(self, rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
        """
        Add to each of the rows (rows, width) its expert's bias in (experts, width), times scale (rows,) if given.
        """

    def multiply_quantized_experts(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, offsets: Tensor
    ) -> Tensor:
        """
        Multiply rows x (rows, inputs) by their expert's frozen weight (experts, outputs, inputs), given as its storage
        (experts, outputs, units).
        """

    def recurrence_mask(
        self, documents: Tensor, part: RowPart | None = None, cache: KeyValueCache | None = None
    ) -> Any:
        """
        Return the mask that recurrent operations take, made once for all layers in a microbatch.

        documents: int64 (rows, length); a token continues the state if the token before has the same number. With a
        `part`, `documents` covers this rank's tokens, and operations exchange states between ranks. With a cache, every
        row is one document, and operations continue the cached states.
        """

    def causal_conv(self, x: Tensor, weight: Tensor, mask: Any, silu: bool = True) -> Tensor:
        """
        Apply a causal convolution inside documents, channel by channel, and then SiLU unless `silu` is false.

        x (rows, length, channels), result like x; weight (channels, taps), whose last tap is for the token itself.
        """

    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any) -> Tensor:
        """
        Compute S^T q for each token, where the state S becomes exp(g) S + beta k (v - exp(g) S^T k)^T.

        q and k: (rows, length, key_heads, K); v: (rows, length, value_heads, V); g, at most 0, and beta: (rows, length,
        value_heads); result like v. value_heads / key_heads consecutive value heads share a key head. If g is (rows,
        length, value_heads, K), every key channel of the state has a decay of its own.
        """

    def state_space(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Any) -> Tensor:
        """
        Compute S^T q by token, where the state S becomes exp(g) S + k v^T (Mamba-2).

        Inputs have the shapes of `gated_delta_rule`'s, and g is by value head.
        """

    def connect_streams(
        self, streams: Tensor, output: Tensor | None, before: Tensor | None, connection: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Write a branch's output (..., width) to streams (..., n, width) with its weights `before`, and then read the
        next branch's input (..., width) and weights (..., n + 2, n) by its `connection`, unless it is None.

        The first result are the streams; `kernels/hyper_connections/eager.py` has the connection's parameters.
        """
