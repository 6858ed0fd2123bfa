"""Ports for mixture-of-experts models: operations, token dispatch and routers."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels
from drawloom.components.ports.stages import Stages
from drawloom.graph import port
from drawloom.kernels.results import PermutedRows
from drawloom.kernels.weight_formats.eager import StorageFormat

Routes = tuple[Tensor, Tensor, Tensor]
"""Routing tables: rows by choice, choices by row, and row ends by expert; see ExpertKernels."""


@port
class ExpertKernels(Kernels, Protocol):
    """
    Operations for models with experts (MoE).

    Rows are token copies, one per expert choice, sorted by expert. `routes` are three tensors: rows by choice, int32
    (tokens, top_k); choices by row, int32 (tokens * top_k,); and row ends by expert, int32 (experts,). Dropped choices
    have no row, and rows past the last end have undefined contents. The second tensor may be cut off past the last
    end; its length is the number of rows that operations return.
    """

    def swiglu_halves(self, gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """Apply `swiglu` to both halves of (..., 2 * width); result (..., width)."""
        ...

    def oss_swiglu_halves(self, gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
        """
        Return (up + 1) * gate * sigmoid(alpha * gate) for the halves of (..., 2 * width), with `swiglu`'s scale.

        The gate is at most `limit`, and up is between -limit and limit; the result is (..., width).
        """
        ...

    def moe_routes(self, expert_indices: Tensor, num_experts: int) -> Routes:
        """Return routes for integers (tokens, top_k) from 0 to num_experts - 1, or -1 for dropped choices."""
        ...

    def moe_permute(self, x: Tensor, probabilities: Tensor, routes: Routes) -> PermutedRows:
        """
        Copy x (tokens, width) to rows (tokens * top_k, width), and probabilities (tokens, top_k) to rows.
        """
        ...

    def moe_unpermute(self, rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
        """Sum rows by token, multiplied by their probabilities if any: (tokens, width)."""
        ...

    @property
    def moe_peers(self) -> "PeerExchange":
        """Kernels for expert parallelism that read tokens and sums directly from other ranks' memory."""
        ...

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
        """
        Multiply rows x (rows, inputs) by their expert's matrix in (experts, inputs, outputs), or its transpose.
        """
        ...

    def add_expert_bias(self, rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
        """
        Add to each of the rows (rows, width) its expert's bias in (experts, width), times scale (rows,) if given.
        """
        ...

    def multiply_quantized_experts(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, offsets: Tensor
    ) -> Tensor:
        """
        Multiply rows x (rows, inputs) by their expert's frozen weight (experts, outputs, inputs), given as its storage
        (experts, outputs, units).
        """
        ...


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
        ...

    def limit_routes_and_flag_overflow(
        self, routes: Routes, row_limit: int, peak_rows: Tensor
    ) -> tuple[Routes, Tensor]:
        """
        Return routes to at most `row_limit` rows, without the excess choices, and a flag, float32 (1,): NaN if choices
        were dropped, else 0.

        peak_rows: int32 (1,), the maximum number of rows before the limit; it is updated in place.
        """
        ...

    def localize_choices(self, chosen: PeerTensors, first: int, experts: int) -> Tensor:
        """
        Renumber all ranks' choices from 0 for this rank's experts, `first` to before `first + experts`; other choices
        become -1: int32 (ranks * slots, top_k).

        chosen: int32 (slots, top_k) on every rank, -1 in unused slots.
        """
        ...

    def read_rows_and_scalars(
        self, tokens: PeerTensors, scalars: PeerTensors | None, routes: Routes
    ) -> tuple[Tensor, Tensor | None]:
        """
        Copy tokens from all ranks' memory to the rows of this rank's experts: (rows, width), with scalars (rows,).

        tokens: (slots, width) on every rank; scalars: (slots, top_k) on every rank. `routes` determines the row count;
        unused rows have undefined contents.
        """
        ...

    def publish_token_sums(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """
        Sum this rank's expert rows (rows, width) by token into `sums` (tokens, width), for
        `read_token_sums_and_scalars` on the tokens' ranks, and write scalars (rows,) by choice to by_choice (tokens,
        top_k).

        dest_row: int32 (tokens, top_k), a choice's row.
        """
        ...

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
        ...


class Dispatched(NamedTuple):
    """
    Token copies on their experts' rank: `rows` (rows, width), sorted by expert, their probabilities `scale` (rows,),
    and row ends by expert, `ends`, int32 (this rank's experts,).

    `combine` maps the experts' outputs for the rows, (rows, width), to sums (tokens, width) for this rank's tokens.
    Rows past the last end have undefined contents.
    """

    rows: Tensor
    scale: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


@port
class Dispatcher(Protocol):
    """Dispatcher from tokens to their chosen experts and back, differentiable in both directions."""

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Return one row per choice that any rank's token makes among this rank's experts.

        hidden: (tokens, width); chosen: integers (tokens, choices) from 0 to num_experts - 1, or -1 for a dropped
        choice; probabilities: (tokens, choices), at least float32. If several ranks share the experts, all of them call
        this and `combine` in the same order, also without tokens.
        """
        ...


@port
class RowLimit(Protocol):
    """A dispatcher with room for a limited number of rows, without a count before they come."""

    def grow_if_rows_were_dropped(self) -> bool:
        """
        Return whether passes had more rows than room on any rank, and make room for them. A collective.

        The gradients of such passes are wrong; they are not finite.
        """
        ...


@runtime_checkable
class ExpertParallelDispatcher(Protocol):
    """A dispatcher between ranks along the mesh dimension `expert`."""

    supports_expert_parallel: ClassVar[bool]


def supports_expert_parallel(dispatcher: object) -> bool:
    """Return whether a dispatcher, an object or a class, sends tokens to experts on other ranks."""
    return isinstance(dispatcher, ExpertParallelDispatcher) and dispatcher.supports_expert_parallel


ObserveRouting = Callable[[Tensor, Tensor], None]
"""
Callback for the routing of a microbatch: the number of choices of each expert, int64 (experts,), and the scores, at
least float32 (tokens, experts), which add up to 1 by token and have no autograd graph. Padding is not counted, and its
scores are 0.
"""


@runtime_checkable
class ExpertRouter(Protocol):
    """
    A module that assigns tokens to experts.

    `e_score_correction_bias`, a persistent buffer, float32 (num_experts,), is added to the scores for the choice of
    experts; None without such a bias.
    """

    num_experts: int
    e_score_correction_bias: Tensor | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the router's parameters, like `nn.Module.parameters`."""
        ...

    def add_routing_observer(self, observer: ObserveRouting) -> None:
        """Call `observer` once per microbatch in training's forward passes from now on."""
        ...

    def remove_routing_observer(self, observer: ObserveRouting) -> None:
        """Stop calling `observer`."""
        ...


def find_routers(stages: Stages) -> dict[str, ExpertRouter]:
    """Return the routers in this rank's stages by name."""
    named_modules = (item for stage in stages.local for item in stage.module.named_modules())
    return {name: module for name, module in named_modules if isinstance(module, ExpertRouter)}
