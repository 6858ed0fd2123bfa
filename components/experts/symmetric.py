"""
The component `experts.symmetric`: expert parallelism through symmetric memory on one host.

A rank writes its tokens to memory that the host's other ranks can read. Every rank reads its experts' tokens from the
other ranks' memory, directly into its experts' rows. It writes the sums of the experts' results by token to such
memory, from where the tokens' ranks read them. The backward pass does the same in the opposite direction. A barrier
follows every write; ranks do not exchange token counts first.

Exchanges alternate between the memory's halves. A rank writes to a half again only after the other half's barrier, and
before that barrier all ranks have read the first half.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom import UserError, at_least, between, component, internal, setting
from drawloom.components.experts.planned_exchange import dispatch_if_one_rank_or_meta
from drawloom.ports import Dispatched, Group, Kernels, Mesh, PeerTensors, Routes, SymmetricMemory

log = logging.getLogger("drawloom.experts")

ROOM_MARGIN = 1.125
"""Room after rows were dropped, relative to the rows that came, so that a slow drift repeats few steps."""

ALIGNMENT = 256
"""Alignment in bytes of tensors in shared memory, for wide loads."""


@component(impact="safe")
class SymmetricExperts:
    """
    Dispatcher for experts partitioned over one host's ranks, which read tokens from other ranks' GPU memory.

    The host waits once per layer for the row count, or once per step with a `capacity`. If more rows come than fit,
    there is more room from then on, and the step's passes are repeated. In evaluation and sampling, which have no
    gradients, ranks agree on the token count in every layer and make room for all rows, so results do not depend on the
    first microbatch.
    """

    supports_expert_parallel: ClassVar[bool] = True

    kernels: Kernels
    mesh: Mesh
    max_tokens: int = setting(
        "maximum tokens per training microbatch and rank; 0: the first microbatch's maximum over ranks",
        default=0,
        check=between(0, 100_000_001),
    )
    capacity: float | None = setting(
        "rows to make room for at first, relative to balanced experts; default: all rows, counted while the host waits",
        default=None,
        check=at_least(1),
    )
    _exchange: "SharedSlots | None" = internal(None)
    _room: float | None = internal(attrs.Factory(lambda self: self.capacity, takes_self=True))

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Copy all ranks' tokens to rows for this rank's experts.

        hidden is (tokens, width), chosen and probabilities (tokens, choices). Raises UserError for more tokens than the
        settings allow.
        """
        group = self.mesh.expert_group
        local_experts = num_experts // group.size
        dispatched = dispatch_if_one_rank_or_meta(
            self.kernels,
            hidden,
            chosen,
            probabilities,
            experts=local_experts,
            ranks=group.size,
            capacity=self.capacity,
        )
        if dispatched is not None:
            return dispatched
        exchange = self._exchange = self._exchange or SharedSlots(group, self.kernels, self.max_tokens)
        is_training = torch.is_grad_enabled()
        slots = (
            exchange.agree_on_training_slots(hidden)
            if is_training
            else _max_tokens_over_ranks(len(hidden), group, hidden.device)
        )
        tokens, scalars, choices = exchange.publish_tokens_then_barrier(
            slots, hidden.detach(), probabilities.detach(), chosen
        )
        local = self.kernels.moe_peers.localize_choices(choices, group.rank * local_experts, local_experts)
        all_routes = self.kernels.moe_routes(local, local_experts)
        routes, overflow = exchange.limit_routes_and_flag_overflow(all_routes, self._room if is_training else None)
        slot_routes = SlotRoutes(exchange, chosen, local_experts, routes, overflow)
        rows, scale = _GatherRows.apply(slot_routes, tokens, scalars, hidden, probabilities)  # type: ignore[no-untyped-call]
        return Dispatched(rows, scale, routes.offsets, lambda results: _SumByToken.apply(slot_routes, results))  # type: ignore[no-untyped-call]

    @property
    def graph_values(self) -> object:
        """The room, and how often the shared memory was replaced."""
        return self._room, self._exchange.replacement_count if self._exchange else 0

    def grow_if_rows_were_dropped(self) -> bool:
        if self._room is None or self.mesh.expert_group.size == 1:
            return False
        needed = self._exchange.find_needed_capacity(self._room) if self._exchange else 0.0
        most = torch.tensor(needed, dtype=torch.float64)
        self.mesh.world.max(most)
        if not most:
            return False
        before, self._room = self._room, ROOM_MARGIN * float(most)  # equal on all ranks, as the graphs with it must be
        if needed:
            log.warning(
                "rank %d of %d received %.3g times the rows of balanced experts, and had room for %.3g times as many; "
                "the step is repeated with room for %.3g times, which a larger capacity saves",
                self.mesh.expert_group.rank,
                self.mesh.expert_group.size,
                needed,
                before,
                self._room,
            )
        return True


class SharedSlots:
    """
    Memory shared by a group's ranks, with two halves; a half has room for one exchange.

    All ranks have equally many token slots in an exchange: in training `max_tokens`, or if it is 0 the first
    microbatch's maximum over ranks.
    """

    def __init__(self, group: Group, kernels: Kernels, max_tokens: int) -> None:
        self.group = group
        self.kernels = kernels
        self._training_slots = max_tokens
        self._memory: SymmetricMemory | None = None
        self._outgrown: list[SymmetricMemory] = []  # kept, because other ranks may still read it
        self._half = 0
        self._views: dict[Any, list[PeerTensors]] = {}
        self._max_rows: dict[int, Tensor] = {}  # (1,) on the device, by a balanced rank's rows

    @property
    def replacement_count(self) -> int:
        """How often memory was too small and replaced; equal on all ranks."""
        return len(self._outgrown)

    def agree_on_training_slots(self, hidden: Tensor) -> int:
        """
        Return the number of token slots per training microbatch, equal on all ranks.

        Raises UserError if hidden (tokens, width) has more tokens.
        """
        self._training_slots = self._training_slots or _max_tokens_over_ranks(len(hidden), self.group, hidden.device)
        if len(hidden) > self._training_slots:
            raise UserError(
                f"experts.symmetric: rank {self.group.rank} of {self.group.size} has {len(hidden)} tokens, and memory "
                f"for {self._training_slots} tokens; set max_tokens = {len(hidden)} or more on the dispatcher"
            )
        return self._training_slots

    def publish_tokens_then_barrier(
        self, slots: int, hidden: Tensor, scalars: Tensor | None = None, chosen: Tensor | None = None
    ) -> list[PeerTensors]:
        """
        Write tokens (tokens, width), scalars and chosen experts (tokens, choices) to memory readable for all ranks.

        Return all ranks' tensors, (slots, ...).
        """
        tensors = [tensor for tensor in (hidden, scalars, chosen) if tensor is not None]
        dtypes = [tensor.dtype if tensor.is_floating_point() else torch.int32 for tensor in tensors]
        columns = [(tensor.shape[1], dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        published = self.switch_halves_and_get_views(slots, columns)
        self.kernels.moe_peers.write_tokens_to_slots(tensors, [parts[self.group.rank] for parts, _ in published])
        self.barrier()
        return published

    def switch_halves_and_get_views(
        self, slots: int, columns: list[tuple[int, torch.dtype]], ranks: int = 1
    ) -> list[PeerTensors]:
        """Switch to the memory's other half, and return tensors (ranks * slots, width) in it, one per column."""
        rows = ranks * slots
        self._half = 1 - self._half
        key = self._half, rows, *columns
        if key not in self._views:
            # Training cannot write to tensors of inference mode, and an evaluation may be the first to need the views.
            with torch.inference_mode(False):
                memory = self._ensure_memory(slots, columns)
                self._views[key] = _slice_memory(memory.parts, self._half, rows, columns)
        return self._views[key]

    def _ensure_memory(self, slots: int, columns: list[tuple[int, torch.dtype]]) -> SymmetricMemory:
        """Return memory with room, in both halves, for the columns in all ranks' slots."""
        needed = sum(
            _round_up_to_alignment(self.group.size * slots * width * dtype.itemsize) for width, dtype in columns
        )
        if self._memory is None or 2 * needed > len(self._memory.parts[0]):
            self._outgrown += [self._memory] if self._memory else []
            self._memory = self.group.allocate_symmetric_memory(2 * needed)
            self._views.clear()
        return self._memory

    def barrier(self) -> None:
        """Make all ranks' writes visible to later operations."""
        if self._memory is not None:
            self._memory.barrier()

    def limit_routes_and_flag_overflow(self, routes: Routes, capacity: float | None) -> tuple[Routes, Tensor | None]:
        """
        Cut routes to the rows in use, or to the rows that fit `capacity`. Without a capacity the host waits for the
        count.

        With a capacity, also return a tensor (1,) on the device: NaN if rows were dropped, else 0.
        """
        dest, source, ends = routes
        if capacity is None:
            return Routes(dest, source[: int(ends[-1])], ends), None
        balanced = dest.numel() // self.group.size
        if balanced not in self._max_rows:
            with torch.inference_mode(False):
                self._max_rows[balanced] = torch.zeros(1, dtype=ends.dtype, device=ends.device)
        room = min(_compute_room(capacity, balanced), len(source))
        return self.kernels.moe_peers.limit_routes_and_flag_overflow(routes, room, self._max_rows[balanced])

    def find_needed_capacity(self, capacity: float) -> float:
        """Return the capacity for the most rows so far, 0 if it is no larger than `capacity`. The host waits."""
        ratios = [
            rows / balanced
            for balanced, peak in self._max_rows.items()
            if (rows := int(peak)) > _compute_room(capacity, balanced)
        ]
        return max(ratios, default=0.0)


def _compute_room(capacity: float, balanced: int) -> int:
    """Return the rows to make room for; balanced experts have `balanced` rows."""
    return math.ceil(capacity * balanced)


@attrs.frozen(eq=False)
class SlotRoutes:
    """
    A microbatch's routes to a layer's experts and back.

    `chosen` (tokens, choices) are this rank's choices, `experts` is the expert count per rank, and `routes` lead from
    all ranks' tokens to the rows of this rank's experts. `overflow` (1,) is NaN if rows were dropped, else 0.
    """

    exchange: SharedSlots
    chosen: Tensor
    experts: int
    routes: Routes
    overflow: Tensor | None = None

    def read_rows_and_scalars(self, tokens: PeerTensors, scalars: PeerTensors | None) -> tuple[Tensor, Tensor | None]:
        """Return this rank's expert rows (rows, width) and their scalars (rows,)."""
        return self.exchange.kernels.moe_peers.read_rows_and_scalars(tokens, scalars, self.routes)

    def exchange_token_sums_and_scalars(self, rows: Tensor, scalars: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the sums (tokens, width) by token over all ranks' rows, and the scalars (tokens, choices)."""
        exchange, dest = self.exchange, self.routes.dest_row
        columns = [(rows.shape[1], rows.dtype), *([(dest.shape[1], scalars.dtype)] if scalars is not None else [])]
        staged, *by_choice = exchange.switch_halves_and_get_views(self.slots_per_rank, columns, exchange.group.size)
        rank, kernels = exchange.group.rank, exchange.kernels.moe_peers
        kernels.publish_token_sums(rows, scalars, dest, staged[0][rank], by_choice[0][0][rank] if by_choice else None)
        exchange.barrier()
        first = rank * self.slots_per_rank
        return kernels.read_token_sums_and_scalars(
            staged, by_choice[0] if by_choice else None, self.chosen, first, self.experts
        )

    @property
    def slots_per_rank(self) -> int:
        """The number of token slots per rank."""
        return len(self.routes.dest_row) // self.exchange.group.size


class _GatherRows(Function):
    """Copy from tokens in all ranks' memory to expert rows; the backward pass sums the rows' gradients by token."""

    @staticmethod
    def forward(
        ctx: Any, routes: SlotRoutes, tokens: PeerTensors, scalars: PeerTensors, hidden: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return rows (rows, width) and their probabilities (rows,)."""
        ctx.routes = routes
        return routes.read_rows_and_scalars(tokens, scalars)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, probabilities_grad = ctx.routes.exchange_token_sums_and_scalars(grad, grad_scale)
        if ctx.routes.overflow is not None:
            # Not in the forward pass: later layers' routers would send all tokens to the same experts.
            (probabilities_grad if ctx.needs_input_grad[4] else hidden_grad).add_(ctx.routes.overflow)
        return None, None, None, hidden_grad, probabilities_grad


class _SumByToken(Function):
    """Sum over the experts' results by token; the backward pass copies the tokens' gradients to expert rows."""

    @staticmethod
    def forward(ctx: Any, routes: SlotRoutes, results: Tensor) -> Tensor:
        """Sum results (rows, width) by this rank's tokens: (tokens, width)."""
        ctx.routes = routes
        return routes.exchange_token_sums_and_scalars(results, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.routes.exchange.publish_tokens_then_barrier(ctx.routes.slots_per_rank, grad)
        return None, ctx.routes.read_rows_and_scalars(tokens, None)[0]


def _max_tokens_over_ranks(tokens: int, group: Group, device: torch.device) -> int:
    """Return the maximum token count over ranks, at least 1; a collective."""
    maximum = torch.tensor([max(tokens, 1)], device=device)
    group.max(maximum)
    return int(maximum)


def _round_up_to_alignment(size: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _slice_memory(
    parts: Sequence[Tensor], half: int, rows: int, columns: list[tuple[int, torch.dtype]]
) -> list[PeerTensors]:
    """Return tensors (rows, width) on every rank, one per column, laid out in succession in one half of the memory."""
    first, views = half * (len(parts[0]) // 2), list[PeerTensors]()
    for width, dtype in columns:
        size = rows * width * dtype.itemsize
        tensors = [part[first : first + size].view(dtype).view(rows, width) for part in parts]
        views.append((tensors, torch.tensor([tensor.data_ptr() for tensor in tensors]).to(parts[0].device)))
        first += _round_up_to_alignment(size)
    return views
