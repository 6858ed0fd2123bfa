"""The ports of models with experts: operations, what brings tokens to their experts, and routers."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels
from drawloom.components.ports.stages import Stages
from drawloom.graph import port


@port
class ExpertKernels(Kernels, Protocol):
    """
    The operations of a model with experts.

    Rows are copies of tokens, one for each choice of an expert, sorted by expert. `routes` are three tensors: the row
    of each choice, int32 (tokens, top_k); the choice of each row, int32 (tokens * top_k,); and where each expert's
    rows end, int32 (experts,). Dropped choices have no row, and rows past the last offset may hold anything; the second
    tensor may be cut off behind it, and as many rows are made as it is long.
    """

    def swiglu_halves(self, both: Tensor, scale: Tensor | None = None) -> Tensor:
        """`swiglu` of the two halves of (..., 2 * width); gives (..., width)."""
        ...

    def moe_routes(self, expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Routes for integers (tokens, top_k) from 0 to num_experts - 1, or -1 for dropped choices."""
        ...

    def moe_permute(
        self, x: Tensor, probabilities: Tensor, routes: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows (tokens * top_k, width) of x (tokens, width), and the probability (tokens, top_k) of each."""
        ...

    def moe_unpermute(
        self, rows: Tensor, routes: tuple[Tensor, Tensor, Tensor], probabilities: Tensor | None = None
    ) -> Tensor:
        """Rows, times their probabilities if given, added up by token: (tokens, width)."""
        ...

    @property
    def moe_peers(self) -> "PeerExchange":
        """Copies and sums of tokens that are in the memory of other ranks."""
        ...

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
        """Each row of x (rows, inputs) times its expert's matrix (experts, inputs, outputs), or transposed."""
        ...


Peers = tuple[Sequence[Tensor], Tensor]
"""A tensor of each rank of a group, by rank, of one shape and dtype; and int64 (ranks,), the address of each."""


class PeerExchange(Protocol):
    """
    Copies and sums of tokens in the memory of several ranks, without gradients.

    Each rank has as many slots for tokens, and the tokens of all are numbered by rank, then by slot.
    """

    def publish(self, given: Sequence[Tensor], shown: Sequence[Tensor]) -> None:
        """
        Write hidden states (tokens, width), and maybe scalars and choices (tokens, top_k), to this rank's slots,
        (slots, ...) each; the choices of unused slots become -1.
        """
        ...

    def limit(
        self, routes: tuple[Tensor, Tensor, Tensor], room: int, most: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """
        Routes to `room` rows at most, whose further choices are dropped, and float32 (1,): NaN if there are such, else
        0. most, int32 (1,), becomes the number of rows before the limit, if that is greater.
        """
        ...

    def choices(self, chosen: Peers, first: int, experts: int) -> Tensor:
        """
        The choices, int32 (ranks * slots, top_k), that fell on `experts` experts from `first` on, counted from there;
        -1 for others. chosen: int32 (slots, top_k) of each rank, -1 in unused slots.
        """
        ...

    def rows(
        self, tokens: Peers, scalars: Peers | None, routes: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """
        Tokens, (slots, width) of each rank, and their scalars, (slots, top_k), at the rows of their choices: (rows,
        width) and (rows,), as many as `routes` names choices. Unused rows hold anything.
        """
        ...

    def stage(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor, sums: Tensor, by_choice: Tensor | None
    ) -> None:
        """
        Write each token's sum of rows (rows, width) to sums (tokens, width), and the scalar (rows,) of each choice to
        by_choice (tokens, top_k); dest_row is int32 (tokens, top_k).
        """
        ...

    def sums(
        self, staged: Peers, by_choice: Peers | None, chosen: Tensor, first: int, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        """
        The sums of this rank's tokens, the first of which is number `first` of (ranks * slots, width) of each rank,
        over the ranks where they have chosen an expert; and the scalar of each choice, of (ranks * slots, top_k).

        chosen: integers (tokens, top_k), -1 for dropped ones; each rank has `experts`. Gives (tokens, width) and
        (tokens, top_k).
        """
        ...


class Dispatched(NamedTuple):
    """
    Copies of tokens at the rank of their experts: `rows` (rows, width), sorted by expert, `scale` (rows,), the
    probability of each, and `ends`, int32 (experts of this rank,), where each expert's rows end.

    `combine` makes of what experts give for the rows, (rows, width), the sums (tokens, width) of this rank's tokens.
    Rows past the last end may hold anything.
    """

    rows: Tensor
    scale: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


@port
class Dispatcher(Protocol):
    """Brings tokens to the experts that they chose, and back. Both are differentiable."""

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        A row for each choice of a token that fell on an expert of this rank.

        hidden: (tokens, width); chosen: integers (tokens, choices) from 0 to num_experts - 1, or -1 for a dropped one;
        probabilities: (tokens, choices), at least float32. Where several ranks share the experts, all call this and
        `combine` in the same order, those without tokens, too.
        """
        ...


@runtime_checkable
class ExpertParallelDispatcher(Protocol):
    """A dispatcher between ranks along the mesh dimension `expert`."""

    supports_expert_parallel: ClassVar[bool]


def supports_expert_parallel(dispatcher: object) -> bool:
    """Return whether a dispatcher, which is an object or a class, brings tokens to the experts of other ranks."""
    return isinstance(dispatcher, ExpertParallelDispatcher) and dispatcher.supports_expert_parallel


ObserveRouting = Callable[[Tensor, Tensor], None]
"""Takes how many of a microbatch's choices each expert has, int64 (experts,), and the scores by token, which add up to
1: at least float32 (tokens, experts), without a graph."""


@runtime_checkable
class ExpertRouter(Protocol):
    """
    What sends tokens to experts: a module of a stage that has these members.

    `e_score_correction_bias`, a persistent buffer, float32 (num_experts,), is added to the scores of experts where they
    are chosen; None if the model has none.
    """

    num_experts: int
    e_score_correction_bias: Tensor | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, as of every module."""
        ...

    def observe(self, observer: ObserveRouting) -> None:
        """Call `observer` in each forward pass of training from now on, once for a microbatch."""
        ...

    def ignore(self, observer: ObserveRouting) -> None:
        """Call it no more."""
        ...


def routers_of(stages: Stages) -> dict[str, ExpertRouter]:
    """The routers of this rank's stages, by name."""
    named = (each for stage in stages.local for each in stage.module.named_modules())
    return {name: module for name, module in named if isinstance(module, ExpertRouter)}
