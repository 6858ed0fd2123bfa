"""
Frozen weights in host memory: a weight is copied to the device where it is used, in both passes.

Steps use weights in the same order, so the next weights of the last step, about a block's, are on their way while the
device computes. ZeRO-Infinity prefetches by a trace, too (Rajbhandari et al. 2021, arXiv 2104.07857, section 6.2).
Frozen weights do not change, so nothing is copied back.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, component, internal
from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.components.frozen_weights.layers import find_storable_weights, get_format, set_format
from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.layers import Linear
from drawloom.kernels.host_copies import trace_copy_on_meta
from drawloom.ports import (
    Device,
    MemoryKind,
    Precision,
    RankSlice,
    StageFeature,
    StageNodes,
    Ticket,
    Transfers,
    WrappingOrder,
)

WINDOW_BYTES = 2**28
"""Bytes on their way to the device, ahead of the weight in use; at least one weight."""

ALIGNMENT = 16
"""Weights begin at multiples of these bytes, whatever their dtypes."""


@component(impact="safe")
class StreamedWeights(StageFeature):
    """
    Frozen weights of linear layers and experts in pinned host memory, copied to the device ahead of their use.

    A model then takes less memory, and time if copies take longer than a pass.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.PLACEMENT
    excludes: ClassVar[Mapping[str, str]] = {
        "stages.compiled": "torch.compile does not trace copies from host memory",
        "pipeline.captured": "a CUDA graph has its weights in fixed places on the device",
    }
    keeps_layer_shapes: ClassVar[bool] = True

    device: Device
    open_transfers: Callable[[torch.device], Transfers] = internal(DeviceTransfers)
    byte_count: int = internal(0)
    _order: list[Tensor] = internal(factory=list)
    _fetched: list[Tensor] = internal(factory=list)
    _arriving: deque[tuple[Tensor, Ticket]] = internal(factory=deque)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for streamed weights if none is frozen, or with shards."""
        yield from nodes.check_some_weights_are_frozen(feature)
        if nodes.sizes.data_shard * nodes.sizes.context > 1:
            text = "weights sharded along data_shard and context are gathered from other ranks' devices"
            hint = f"remove [{feature.name}], or write data_shard = 1 and context = 1 in [{nodes.mesh.name}]"
            yield feature.problem("use", text, hint)

    @cached_property
    def _transfers(self) -> Transfers:
        return self.open_transfers(self.device.device)

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        """Let layers fetch their frozen weights before they decode them."""
        for layer, leaf in _find_frozen_weights(module):
            storage_format: Any = get_format(layer, leaf)  # a dataclass
            set_format(layer, leaf, replace(storage_format, fetch=self.fetch))

    def place(self, modules: Sequence[nn.Module]) -> None:
        """Replace modules' frozen weights on the meta device by host memory, which is still to be filled."""
        self.place_on_meta(modules, ())
        for module in modules:
            frozen = _find_frozen_weights(module)
            sizes = [-(-layer.get_parameter(leaf).nbytes // ALIGNMENT) * ALIGNMENT for layer, leaf in frozen]
            memory = self._transfers.allocate_pinned_host_memory(sum(sizes))
            for (layer, leaf), part in zip(frozen, torch.split(memory, sizes), strict=True):
                weight = layer.get_parameter(leaf)
                data = part[: weight.nbytes].view(weight.dtype).view(weight.shape)
                setattr(layer, leaf, nn.Parameter(data, requires_grad=False))

    def place_on_meta(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        frozen = [weight for module in modules for weight in _find_frozen_weights(module)]
        self.byte_count = sum(layer.get_parameter(leaf).nbytes for layer, leaf in frozen)

    def before_passes(self, only_if_changed: bool = False) -> None:
        """Expect the order of fetches since the last call again."""
        self._drop_arriving()
        self._order, self._fetched = self._fetched, []

    def count_host_bytes(self) -> int:
        return self.byte_count

    def change_device_bytes(self, sizes: MutableMapping[MemoryKind, int]) -> None:
        """Count weights on their way to the device instead of all."""
        sizes["compute_copies"] = sizes.get("compute_copies", 0) + min(WINDOW_BYTES, self.byte_count)
        sizes["parameters"] -= self.byte_count

    def fetch(self, stored: Tensor) -> Tensor:
        """Return a storage's copy on the device (any shape), and start to copy the next ones."""
        if stored.is_meta:
            return trace_copy_on_meta(stored)
        number = len(self._fetched)
        self._fetched.append(stored)
        is_expected = number < len(self._order) and self._order[number].data_ptr() == stored.data_ptr()
        if not is_expected:
            self._drop_arriving()
        copy, ticket = self._arriving.popleft() if self._arriving else self._start_copy(stored)
        following = number + 1 + len(self._arriving)
        while is_expected and following < len(self._order) and self._fits_in_copy_window(self._order[following]):
            self._arriving.append(self._start_copy(self._order[following]))
            following += 1
        self._transfers.make_computation_wait(ticket)
        return copy

    def close(self) -> None:
        """Release the host memory."""
        self._arriving.clear()
        if self.byte_count:
            self._transfers.close()

    def _fits_in_copy_window(self, stored: Tensor) -> bool:
        """Return whether a storage may be on its way with the others."""
        return not self._arriving or sum(copy.nbytes for copy, _ in self._arriving) + stored.nbytes <= WINDOW_BYTES

    def _start_copy(self, stored: Tensor) -> tuple[Tensor, Ticket]:
        copy = torch.empty_like(stored, device=self.device.device)
        # The allocator may hand out memory that computation still uses.
        return copy, self._transfers.copy_to_device([(copy, stored)], [self._transfers.mark_computation()])

    def _drop_arriving(self) -> None:
        """Drop copies of weights that are not used next; their memory is free when they have arrived."""
        if self._arriving:
            self._transfers.make_computation_wait(self._arriving[-1][1])
            self._arriving.clear()


def _find_frozen_weights(module: nn.Module) -> list[tuple[Linear | Experts, str]]:
    """Return layers and parameter names of a module's frozen weights."""
    weights = find_storable_weights(module).values()
    return [(layer, leaf) for layer, leaf in weights if not layer.get_parameter(leaf).requires_grad]
