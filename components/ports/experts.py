"""Ports of mixture-of-experts models: operations, token dispatch and routers."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels
from drawloom.components.ports.stages import Stages
from drawloom.graph import port


@port
class ExpertKernels(Kernels, Protocol):
    """
    Operations of a model with experts (MoE).

    Rows are copies of tokens, one for each choice of an expert, sorted by expert. `routes` are three tensors: the row
    of each choice, int32 (tokens, top_k); the choice of each row, int32 (tokens * top_k,); and the end of each expert's
    rows, int32 (experts,). Dropped choices have no row, and the contents of rows past the last end are undefined. The
    second tensor may be cut off past the last end; its length is the number of rows that operations return.
    """

    def swiglu_halves(self, both: Tensor, scale: Tensor | None = None) -> Tensor:
        """Apply `swiglu` to the two halves of (..., 2 * width); result (..., width)."""
        ...

    def moe_routes(self, expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return routes for integers (tokens, top_k) from 0 to num_experts - 1, or -1 for dropped choices."""
        ...

    def moe_permute(
        self, x: Tensor, probabilities: Tensor, routes: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """
        Return rows (tokens * top_k, width) of x (tokens, width), and the probability of each from (tokens, top_k).
        """
        ...

    def moe_unpermute(
        self, rows: Tensor, routes: tuple[Tensor, Tensor, Tensor], probabilities: Tensor | None = None
    ) -> Tensor:
        """Sum rows by token, multiplied by their probabilities if any: (tokens, width)."""
        ...

    @property
    def moe_peers(self) -> "PeerExchange":
        """Copies and sums of tokens in the memory of other ranks."""
        ...

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
        """
        Multiply each row of x (rows, inputs) by its expert's matrix of (experts, inputs, outputs), or its transpose.
        """
        ...


Peers = tuple[Sequence[Tensor], Tensor]
"""One tensor for each rank of a group, in rank order, of equal shape and dtype; and int64 (ranks,), their addresses."""


class PeerExchange(Protocol):
    """
    Copies and sums of tokens in the memory of several ranks, without gradients.

    All ranks have equally many slots for tokens. Tokens of all ranks are numbered by rank, then by slot.
    """

    def publish(self, given: Sequence[Tensor], shown: Sequence[Tensor]) -> None:
        """
        Write hidden states (tokens, width), and optionally scalars and choices (tokens, top_k), to this rank's slots,
        (slots, ...) each; the choices of unused slots become -1.
        """
        ...

    def limit(
        self, routes: tuple[Tensor, Tensor, Tensor], room: int, most: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """
        Return routes to at most `room` rows, without the excess choices, and float32 (1,): NaN if choices were dropped,
        else 0.

        most: int32 (1,), the maximum number of rows before the limit; it is updated in place.
        """
        ...

    def choices(self, chosen: Peers, first: int, experts: int) -> Tensor:
        """
        Return the choices of `experts` experts from `first` on, renumbered from 0; others are -1: int32 (ranks * slots,
        top_k).

        chosen: int32 (slots, top_k) of each rank, -1 in unused slots.
        """
        ...

    def rows(
        self, tokens: Peers, scalars: Peers | None, routes: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """
        Return tokens (rows, width) and their scalars (rows,) at the rows of their choices.

        tokens: (slots, width) of each rank; scalars: (slots, top_k) of each rank. `routes` determines the number of
        rows; the contents of unused rows are undefined.
        """
        ...

    def stage(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """
        Write the sum of each token's rows (rows, width) to sums (tokens, width), and the scalar (rows,) of each choice
        to by_choice (tokens, top_k). dest_row: int32 (tokens, top_k).
        """
        ...

    def sums(
        self, staged: Peers, by_choice: Peers | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """
        Return the sum of this rank's tokens over the ranks of their experts, (tokens, width), and the scalar of each
        choice, (tokens, top_k).

        staged: (ranks * slots, width) of each rank, in which this rank's tokens start at row `first`; by_choice: (ranks
        * slots, top_k) of each rank; chosen: integers (tokens, top_k), -1 for dropped choices. Each rank has `experts`
        experts.
        """
        ...


class Dispatched(NamedTuple):
    """
    Copies of tokens on the rank of their experts: `rows` (rows, width), sorted by expert, `scale` (rows,), the
    probability of each, and `ends`, int32 (experts of this rank,), the end of each expert's rows.

    `combine` maps the experts' outputs for the rows, (rows, width), to sums (tokens, width) of this rank's tokens. The
    contents of rows past the last end are undefined.
    """

    rows: Tensor
    scale: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


@port
class Dispatcher(Protocol):
    """Dispatcher of tokens to their chosen experts and back; differentiable in both directions."""

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Return a row for each choice, by any rank's token, of an expert of this rank.

        hidden: (tokens, width); chosen: integers (tokens, choices) from 0 to num_experts - 1, or -1 for a dropped
        choice; probabilities: (tokens, choices), at least float32. If several ranks share the experts, all of them call
        this and `combine` in the same order, also without tokens.
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
least float32 (tokens, experts), which add up to 1 by token and have no autograd graph.
"""


@runtime_checkable
class ExpertRouter(Protocol):
    """
    A module that assigns tokens to experts.

    `e_score_correction_bias`, a persistent buffer, float32 (num_experts,), is added to the scores when experts are
    chosen; None if the model has no such bias.
    """

    num_experts: int
    e_score_correction_bias: Tensor | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the router's parameters, as every module does."""
        ...

    def observe(self, observer: ObserveRouting) -> None:
        """Call `observer` once for each microbatch in training's forward passes from now on."""
        ...

    def ignore(self, observer: ObserveRouting) -> None:
        """Stop the calls of `observer`."""
        ...


def routers_of(stages: Stages) -> dict[str, ExpertRouter]:
    """Return the routers of this rank's stages by name."""
    named_modules = (item for stage in stages.local for item in stage.module.named_modules())
    return {name: module for name, module in named_modules if isinstance(module, ExpertRouter)}
