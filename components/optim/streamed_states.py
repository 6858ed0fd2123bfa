"""
Optimizer steps with state in host memory: pieces of it are streamed through slots on the device.

While the device updates a piece, the next ones arrive and the previous ones leave; both directions of the link are in
use at once, as in llmq and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 5). The arithmetic, and
therefore every bit, is that of a state on the device.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom import UserError, internal
from drawloom.components.optim.host_states import ALIGNMENT, SLOTS
from drawloom.kernels.adamw.eager import ALL, PER_DRAW, ParamState
from drawloom.ports import Ticket, Transfers

PIECE = 512
"""Elements at whose multiples a weight without rows is cut: an even number, for the noise of pairs."""


@attrs.define(eq=False)
class Slots:
    """Memory on a device for `SLOTS` pieces of state, of `size` bytes, which launches use in turn."""

    transfers: Transfers
    device: torch.device
    size: int
    memory: list[Tensor] = internal(factory=list)
    free: list[Ticket] = internal(factory=list)
    _next: int = internal(0)

    def allocate_slots(self) -> None:
        """Allocate the memory."""
        self.memory = [torch.empty(self.size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        # The allocator may hand out memory that computation still uses.
        self.free = [self.transfers.mark_computation()] * SLOTS

    def assign_slot_round_robin(self) -> int:
        """Return the next slot's number; slots take turns."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        return slot


@attrs.frozen(eq=False)
class Range:
    """Elements `start` to `stop` in weight `number`, with their state in host memory: a flat tensor by field."""

    number: int
    start: int
    stop: int
    state: Mapping[str, Tensor]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state in a slot."""
        return sum(round_up_to_alignment(tensor.nbytes) for tensor in self.state.values())


def round_up_to_alignment(size: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def list_state_tensors(param: ParamState) -> dict[str, Tensor]:
    """Return a parameter's state by field, without the weight: tensors of the weight's shape."""
    named = {entry.name: getattr(param, entry.name) for entry in fields(param) if entry.name != "weight"}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def allocate_state_in_host_memory(
    transfers: Transfers, specs: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
) -> dict[str, dict[str, Tensor]]:
    """Return zeros in host memory by parameter and field, with these shapes and dtypes, in one allocation."""
    keys = [(name, field) for name in specs for field in specs[name]]
    sizes = [math.prod(specs[name][field][0]) * specs[name][field][1].itemsize for name, field in keys]
    parts = torch.split(
        transfers.allocate_pinned_host_memory(sum(map(round_up_to_alignment, sizes))),
        [*map(round_up_to_alignment, sizes)],
    )
    state: dict[str, dict[str, Tensor]] = {name: {} for name in specs}
    for (name, field), size, part in zip(keys, sizes, parts, strict=True):
        shape, dtype = specs[name][field]
        state[name][field] = part[:size].view(dtype).view(shape)
    return state


def cut_ranges_by_state_bytes(number: int, param: ParamState, size: int) -> Iterator[Range]:
    """Yield ranges of a weight whose state takes at most `size` bytes; at least one row, or `PIECE` elements."""
    state = {name: tensor.view(-1) for name, tensor in list_state_tensors(param).items()}
    unit, count = PIECE if param.is_one_flat_range else param.row_width, param.weight.numel()
    if param.has_8bit_moments:
        # An even number of whole rows, since blocks end with rows.
        unit = math.lcm(PER_DRAW * param.weight.shape[-1], unit if not param.is_one_flat_range else 1)
    unit_bytes = sum(tensor.nbytes for tensor in state.values()) * unit // max(count, 1)
    step = max((size - ALIGNMENT * len(state)) // unit_bytes, 1) * unit if count else 1
    for start in range(0, count, step):
        stop = min(start + step, count)
        # A flat state tensor, such as scales, may have fewer elements than the weight.
        parts = {
            name: tensor[start * len(tensor) // count : stop * len(tensor) // count] for name, tensor in state.items()
        }
        yield Range(number, start, stop, parts)


@attrs.frozen(eq=False)
class Piece:
    """Ranges that are updated together in a slot, their state there by field, and the copies in both directions."""

    ranges: Sequence[Range]
    slot: int
    on_device: Sequence[Mapping[str, Tensor]]
    fetches: Sequence[tuple[Tensor, Tensor]]
    stores: Sequence[tuple[Tensor, Tensor]]


class StateStream:
    """Stream of state in host memory through slots on the device, in the ranges' order."""

    def __init__(self, slots: Slots, ranges: Iterable[Range]) -> None:
        """Lay out the ranges' state in slots. Raises UserError if a single range exceeds a slot."""
        self._slots = slots
        self.pieces = [self._place_piece_in_slot(group) for group in self._group_ranges_by_slot(ranges)]
        self._stored: list[Ticket] = [None] * len(self.pieces)
        self._arrivals: list[Ticket] = []

    def stream_pieces(self) -> Iterator[Piece]:
        """Yield every piece when its state is on the device; it leaves when the caller asks for the next one."""
        arrivals, self._arrivals = self._arrivals, []
        for number, piece in enumerate(self.pieces):
            for ahead in range(len(arrivals), min(number + SLOTS, len(self.pieces))):
                arrivals.append(self._start_fetch(ahead))
            self._slots.transfers.make_computation_wait(arrivals[number])
            yield piece
            left = self._slots.transfers.copy_to_host(piece.stores, [self._slots.transfers.mark_computation()])
            self._stored[number] = self._slots.free[piece.slot] = left

    def start_prefetch(self) -> None:
        """Start to fetch the first pieces of the next step, after all launches with the same slots."""
        while len(self._arrivals) < min(SLOTS, len(self.pieces)):
            self._arrivals.append(self._start_fetch(len(self._arrivals)))

    def drop_prefetched(self) -> None:
        """Drop prefetched pieces, because the state in host memory has changed; the next step fetches them again."""
        self._arrivals = []

    def _start_fetch(self, number: int) -> Ticket:
        """Start to copy a piece's state into its slot, once the slot is free and the last step's state is stored."""
        piece = self.pieces[number]
        return self._slots.transfers.copy_to_device(piece.fetches, [self._slots.free[piece.slot], self._stored[number]])

    def _group_ranges_by_slot(self, ranges: Iterable[Range]) -> Iterator[list[Range]]:
        """Yield lists of ranges whose state fits into one slot."""
        group: list[Range] = []
        for part in ranges:
            if group and sum(other.state_bytes for other in group) + part.state_bytes > self._slots.size:
                yield group
                group = []
            group.append(part)
        if group:
            yield group

    def _place_piece_in_slot(self, group: list[Range]) -> Piece:
        """Lay out a group's state in the next slot. Raises UserError if a single row's state exceeds a slot."""
        if (needed := sum(part.state_bytes for part in group)) > self._slots.size:
            text = f"a row's optimizer state takes {needed} bytes, and a slot has {self._slots.size}"
            raise UserError(f"optim.stochastic_adamw: {text}; write a larger slot_bytes", exit_code=2)
        slot, offset = self._slots.assign_slot_round_robin(), 0
        memory, on_device, fetches = self._slots.memory[slot], list[Mapping[str, Tensor]](), []
        for part in group:
            state = {}
            for name, tensor in part.state.items():
                state[name] = memory[offset : offset + tensor.nbytes].view(tensor.dtype)
                fetches.append((state[name], tensor))
                offset += round_up_to_alignment(tensor.nbytes)
            on_device.append(state)
        return Piece(group, slot, on_device, fetches, [(host, device) for device, host in fetches])


class StreamedStep:
    """Optimizer step like `AdamwEager`, for weights on a device whose state is in host memory."""

    def __init__(self, implementation: Any, slots: Slots, params: Sequence[ParamState], maximize: bool) -> None:
        ranges = (
            part for number, param in enumerate(params) for part in cut_ranges_by_state_bytes(number, param, slots.size)
        )
        self.stream = StateStream(slots, ranges)
        self._steppers = [
            implementation(
                [
                    _slice_param_state(params[part.number], part, state)
                    for part, state in zip(piece.ranges, piece.on_device, strict=True)
                ],
                maximize,
            )
            for piece in self.stream.pieces
        ]

    def step(
        self,
        grads: Sequence[Tensor],
        scalars: Tensor,
        counter: int | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """
        Update all weights and their state in place. AdamwEager.step has the same arguments; scalars (6,).

        `scalars`, `counter` and `found_inf` are the same for all weights, so every piece gets them whole.
        """
        flat = [grad.reshape(-1) for grad in grads]
        for piece, stepper in zip(self.stream.stream_pieces(), self._steppers, strict=True):
            parts = [flat[part.number][part.start : part.stop] for part in piece.ranges]
            stepper.step(parts, scalars, counter, found_inf)


class StreamedTorchStep:
    """Steps of a torch optimizer for parameters with state in host memory: a piece of whole parameters at a time."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, slots: Slots, states: Mapping[nn.Parameter, Mapping[str, Tensor]]
    ) -> None:
        """Divide the optimizer's parameters into pieces; `states` has the state in host memory, by parameter."""
        self._optimizer = optimizer
        self._states = states
        self.parameters = [part for group in optimizer.param_groups for part in group["params"] if part in states]
        self.stream = StateStream(
            slots,
            [
                Range(number, 0, part.numel(), {name: tensor.view(-1) for name, tensor in states[part].items()})
                for number, part in enumerate(self.parameters)
            ],
        )
        self.use_host_state()

    def use_host_state(self) -> None:
        """Let the optimizer's state be that in host memory."""
        for part in self.parameters:
            self._optimizer.state[part].update(self._states[part])

    def step(self, advance: Callable[[], object]) -> None:
        """Call `advance` for the parameters with state on the device, and for every piece while its state is there."""
        groups = self._optimizer.param_groups
        try:
            self._restrict_optimizer_groups(
                groups, {part for group in groups for part in group["params"]} - {*self.parameters}
            )
            advance()
            for piece in self.stream.stream_pieces():
                members = [self.parameters[part.number] for part in piece.ranges]
                for member, state in zip(members, piece.on_device, strict=True):
                    on_device = {name: tensor.view(member.shape) for name, tensor in state.items()}
                    self._optimizer.state[member].update(on_device)
                self._restrict_optimizer_groups(groups, {*members})
                advance()
        finally:
            self._optimizer.param_groups = groups
            self.use_host_state()

    def _restrict_optimizer_groups(self, groups: Sequence[dict[str, Any]], members: Collection[nn.Parameter]) -> None:
        """Let the optimizer's groups have only these parameters."""
        chosen = [group | {"params": [part for part in group["params"] if part in members]} for group in groups]
        self._optimizer.param_groups = [group for group in chosen if group["params"]]


def _slice_param_state(param: ParamState, part: Range, state: Mapping[str, Tensor]) -> ParamState:
    """
    Return a weight's range as its own ParamState, with the same noise as within the whole weight.

    Unless the weight is one flat range, `part` begins at a row. `state` is the range's flat state on the device.
    """
    index_offset = part.start if param.is_one_flat_range else part.start // param.row_width * param.row_stride
    row_width = ALL if param.is_one_flat_range else param.row_width
    weight = param.weight.view(-1)[part.start : part.stop]
    if param.has_8bit_moments:
        rows = weight.numel() // param.weight.shape[-1]
        weight, state = weight.view(rows, -1), {name: tensor.view(rows, -1) for name, tensor in state.items()}
    first_index = param.first_index + index_offset
    changes: dict[str, Any] = {"weight": weight, "first_index": first_index, "row_width": row_width, **state}
    return replace(param, **changes)
