"""
The component `experts.symmetric`.

Each rank writes its tokens to memory that the other ranks of its host can read, and reads from theirs the tokens that
chose its experts, straight to the rows of its experts. What experts give is added up by token in such memory, and each
rank reads the sums of its own tokens. The backward pass does the same the other way round. One barrier follows each
write; nothing is counted before tokens travel.

The memory has two halves, which exchanges use in turn: a rank writes to a half again only after the barrier of the
other, and before that barrier all ranks have read what was in the first.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.components.experts.planned_exchange import without_exchange
from drawloom.components.ports.distributed import Group, Mesh, SymmetricMemory
from drawloom.components.ports.experts import Dispatched, ExpertKernels, Peers
from drawloom.graph import UserError, at_least, between, component, setting

Routes = tuple[Tensor, Tensor, Tensor]

ALIGNMENT = 256
"""Bytes: where tensors in shared memory begin, for wide loads."""


@component(impact="safe")
class SymmetricExperts:
    """
    Ranks of one host share the experts of a layer out, and read each other's tokens from the memory of their GPUs.

    The host waits once in each layer for the number of rows, or never with a `capacity`. Without gradients, as in
    evaluation and sampling, ranks agree on the number of tokens in each layer, and there is room for all rows: what is
    computed does not depend on which microbatch came first.
    """

    supports_expert_parallel: ClassVar[bool] = True

    kernels: ExpertKernels
    mesh: Mesh
    max_tokens: int = setting(
        default=0,
        check=between(0, 100_000_001),
        doc="most tokens of a training microbatch on a rank; 0: as many as the first one has on any rank",
    )
    capacity: float | None = setting(
        default=None,
        check=at_least(1),
        doc="rows that a rank makes room for, in even shares; without it the host waits for their number in each layer",
    )
    _exchanges: dict[int, "SharedSlots"] = attrs.field(init=False, factory=dict)

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Rows for the experts of this rank, from all ranks: hidden (tokens, width), chosen and probabilities (tokens,
        choices). UserError for more tokens or rows than the settings allow.
        """
        group = self.mesh.expert_group
        mine = num_experts // group.size
        if (found := without_exchange(self.kernels, hidden, chosen, probabilities, mine, group.size)) is not None:
            return found
        # Memory of its own for each stream: in one stream alone, exchanges are in order.
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        if stream not in self._exchanges:
            self._exchanges[stream] = SharedSlots(group, self.kernels, self.max_tokens)
        exchange = self._exchanges[stream]
        learns = torch.is_grad_enabled()
        slots = exchange.training_slots(hidden) if learns else _most(len(hidden), group, hidden.device)
        tokens, scalars, choices = exchange.publish(slots, hidden.detach(), probabilities.detach(), chosen)
        local = self.kernels.moe_peers.choices(choices, group.rank * mine, mine)
        routes, lost = exchange.limit(self.kernels.moe_routes(local, mine), self.capacity if learns else None)
        journey = SlotRoutes(exchange, chosen, mine, routes)
        rows, scale = _Rows.apply(journey, tokens, scalars, hidden, probabilities)  # type: ignore[no-untyped-call]
        if lost is not None:
            # NaN if there are: the step is not learned from, even if it ends before the host knows.
            scale = scale + lost
        return Dispatched(rows, scale, routes[2], lambda results: _Sums.apply(journey, results))  # type: ignore[no-untyped-call]


class SharedSlots:
    """
    Memory that the ranks of a group share, with room for the tokens of one exchange, twice.

    An exchange has the same number of slots for tokens on each rank; training always has `max_tokens`, or as many as
    its first microbatch has if that is 0.
    """

    def __init__(self, group: Group, kernels: ExpertKernels, max_tokens: int) -> None:
        self.group = group
        self.kernels = kernels
        self._training_slots = max_tokens
        self._memory: SymmetricMemory | None = None
        self._outgrown: list[SymmetricMemory] = []  # which other ranks may still read
        self._half = 0
        self._views: dict[Any, list[Peers]] = {}
        self._most_rows: tuple[Tensor, Tensor] | None = None  # on the device, and as the host last heard

    def training_slots(self, hidden: Tensor) -> int:
        """Return the slots of a training microbatch. Raises UserError if it has more tokens, (tokens, width)."""
        self._training_slots = self._training_slots or _most(len(hidden), self.group, hidden.device)
        if len(hidden) > self._training_slots:
            raise UserError(
                f"experts.symmetric: rank {self.group.rank} of {self.group.size} has {len(hidden)} tokens, and memory "
                f"for {self._training_slots}; set max_tokens = {len(hidden)} or more on the dispatcher"
            )
        return self._training_slots

    def publish(
        self, slots: int, hidden: Tensor, scalars: Tensor | None = None, chosen: Tensor | None = None
    ) -> list[Peers]:
        """
        Show tokens (tokens, width) to all ranks, with scalars and the experts that they chose (tokens, choices);
        what all ranks show, (slots, ...) each.
        """
        given = [each for each in (hidden, scalars, chosen) if each is not None]
        dtypes = [each.dtype if each.is_floating_point() else torch.int32 for each in given]
        shown = self.views(slots, [(each.shape[1], dtype) for each, dtype in zip(given, dtypes, strict=True)])
        self.kernels.moe_peers.publish(given, [parts[self.group.rank] for parts, _ in shown])
        self.barrier()
        return shown

    def views(self, slots: int, columns: list[tuple[int, torch.dtype]], ranks: int = 1) -> list[Peers]:
        """Tensors (ranks * slots, columns) of these columns and dtypes in the half of the memory whose turn it is."""
        rows = ranks * slots
        self._half = 1 - self._half
        key = self._half, rows, *columns
        if key not in self._views:
            # An evaluation may be the first to need them, and tensors of inference mode can't be written in training.
            with torch.inference_mode(False):
                memory = self._memory_for(slots, columns)
                self._views[key] = _views(memory.parts, self._half, rows, columns)
        return self._views[key]

    def _memory_for(self, slots: int, columns: list[tuple[int, torch.dtype]]) -> SymmetricMemory:
        """Memory with room for a row of these columns from each slot of all ranks, in each half."""
        needed = sum(_aligned(self.group.size * slots * width * dtype.itemsize) for width, dtype in columns)
        if self._memory is None or 2 * needed > len(self._memory.parts[0]):
            self._outgrown += [self._memory] if self._memory else []
            self._memory = self.group.symmetric_memory(2 * needed)
            self._views.clear()
        return self._memory

    def barrier(self) -> None:
        """What follows sees what all ranks have written to the memory before."""
        if self._memory is not None:
            self._memory.barrier()

    def limit(self, routes: Routes, capacity: float | None) -> tuple[Routes, Tensor | None]:
        """
        Routes to as many rows as there are, or as the capacity makes room for; then also NaN if there are more, else 0,
        (1,) on the device. UserError if there were more in an earlier layer.
        """
        dest, source, ends = routes
        if capacity is None:
            return (dest, source[: int(ends[-1])], ends), None
        even = dest.numel() // self.group.size
        room = min(math.ceil(capacity * even), len(source))
        if self._most_rows is None:
            with torch.inference_mode(False):
                there = torch.zeros(1, dtype=ends.dtype, device=ends.device)
                self._most_rows = there, torch.zeros(1, dtype=ends.dtype, pin_memory=ends.is_cuda)
        there, here = self._most_rows
        # What the host has heard of by now, without a wait.
        self._check_rows(int(here), room, even)
        limited = self.kernels.moe_peers.limit(routes, room, there)
        here.copy_(there, non_blocking=True)
        return limited

    def _check_rows(self, rows: int, room: int, even: int) -> None:
        if rows > room:
            enough = math.ceil(10 * rows / even) / 10
            raise UserError(
                f"experts.symmetric: {rows} rows came to the experts of rank {self.group.rank} of {self.group.size}, "
                f"and capacity makes room for {room}; set capacity = {enough}, or leave it out"
            )


@attrs.frozen(eq=False)
class SlotRoutes:
    """
    A microbatch's way to the experts of a layer and back: what this rank's tokens chose, (tokens, choices), how many
    experts each rank has, and the routes from the tokens of all ranks to the rows of this rank's experts.
    """

    exchange: SharedSlots
    chosen: Tensor
    experts: int
    routes: Routes

    def rows(self, tokens: Peers, scalars: Peers | None) -> tuple[Tensor, Tensor | None]:
        """The rows (rows, width) of this rank's experts, and the scalar of each, (rows,)."""
        return self.exchange.kernels.moe_peers.rows(tokens, scalars, self.routes)

    def sums(self, rows: Tensor, scalars: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The sums (tokens, width) by token of rows at all ranks, and the scalars (tokens, choices) of choices."""
        exchange, dest = self.exchange, self.routes[0]
        columns = [(rows.shape[1], rows.dtype), *([(dest.shape[1], scalars.dtype)] if scalars is not None else [])]
        staged, *by_choice = exchange.views(self.slots, columns, exchange.group.size)
        rank, kernels = exchange.group.rank, exchange.kernels.moe_peers
        kernels.stage(rows, scalars, dest, staged[0][rank], by_choice[0][0][rank] if by_choice else None)
        exchange.barrier()
        first = rank * self.slots
        return kernels.sums(staged, by_choice[0] if by_choice else None, self.chosen, first, self.experts)

    @property
    def slots(self) -> int:
        """The slots of each rank."""
        return len(self.routes[0]) // self.exchange.group.size


class _Rows(Function):
    """Tokens at the rows of their experts; backward, the sums of the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, journey: SlotRoutes, tokens: Peers, scalars: Peers, hidden: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Rows (rows, width) and their probabilities (rows,), of tokens (tokens, width), each with (choices,)."""
        ctx.journey = journey
        return journey.rows(tokens, scalars)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.journey.sums(grad, grad_scale)


class _Sums(Function):
    """What experts gave, summed by token; backward, the tokens' gradients at the rows of their experts."""

    @staticmethod
    def forward(ctx: Any, journey: SlotRoutes, results: Tensor) -> Tensor:
        """The sums (tokens, width) of this rank's tokens, of results (rows, width)."""
        ctx.journey = journey
        return journey.sums(results, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.journey.exchange.publish(ctx.journey.slots, grad)
        return None, ctx.journey.rows(tokens, None)[0]


def _most(tokens: int, group: Group, device: torch.device) -> int:
    """The most tokens of any rank, at least 1."""
    most = torch.tensor([max(tokens, 1)], device=device)
    group.max(most)
    return int(most)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(parts: Sequence[Tensor], half: int, rows: int, columns: list[tuple[int, torch.dtype]]) -> list[Peers]:
    """Tensors (rows, columns) one after another in a half of each rank's memory."""
    first, found = half * (len(parts[0]) // 2), list[Peers]()
    for width, dtype in columns:
        size = rows * width * dtype.itemsize
        tensors = [part[first : first + size].view(dtype).view(rows, width) for part in parts]
        found.append((tensors, torch.tensor([each.data_ptr() for each in tensors]).to(parts[0].device)))
        first += _aligned(size)
    return found
