"""
Frozen weights in host memory: a weight is copied to the device where it is used, in both passes.

Steps use weights in the same order, so the next weights of the last step, about a block's, are on their way while the
device computes. ZeRO-Infinity prefetches by a trace, too (Rajbhandari et al. 2021, arXiv 2104.07857, section 6.2).
Frozen weights do not change, so nothing is copied back.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.frozen_formats import find_quantizable_weights
from drawloom.components.ports.features import StageNodes
from drawloom.components.ports.memory import Ticket, Transfers
from drawloom.components.ports.model import QuantizableLayer
from drawloom.graph import Problem
from drawloom.kernels.weight_formats import ComputeFormat, trace_weight_fetch_on_meta

WINDOW_BYTES = 2**28
"""Bytes on their way to the device, ahead of the weight in use; at least one weight."""

ALIGNMENT = 16
"""Weights begin at multiples of these bytes, whatever their dtypes."""


@attrs.define(eq=False)
class StreamedWeights:
    """Frozen weights in pinned host memory, copied to the device ahead of their use, in the last step's order."""

    transfers: Transfers
    device: torch.device
    byte_count: int = attrs.field(init=False, default=0)
    _order: list[Tensor] = attrs.field(init=False, factory=list)
    _fetched: list[Tensor] = attrs.field(init=False, factory=list)
    _arriving: deque[tuple[Tensor, Ticket]] = attrs.field(init=False, factory=deque)

    def stream(self, modules: Iterable[nn.Module]) -> None:
        """Replace modules' frozen weights on the meta device by host memory, which is still to be filled."""
        for module in modules:
            frozen = [*self._make_layers_fetch_frozen_weights(module, self.fetch)]
            sizes = [-(-getattr(layer, leaf).nbytes // ALIGNMENT) * ALIGNMENT for layer, leaf in frozen]
            memory = self.transfers.allocate_pinned_host_memory(sum(sizes))
            for (layer, leaf), part in zip(frozen, torch.split(memory, sizes), strict=True):
                weight = getattr(layer, leaf)
                data = part[: weight.nbytes].view(weight.dtype).view(weight.shape)
                setattr(layer, leaf, nn.Parameter(data, requires_grad=False))

    def simulate_streaming_on_meta(self, modules: Iterable[nn.Module]) -> None:
        """Let modules on the meta device copy frozen weights to the device, for plans."""
        for module in modules:
            _ = [*self._make_layers_fetch_frozen_weights(module, trace_weight_fetch_on_meta)]

    def _make_layers_fetch_frozen_weights(
        self, module: nn.Module, fetch: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[QuantizableLayer, str]]:
        """Let layers fetch their frozen weights; yield layers and parameter names, and count bytes."""
        for layer, leaf in find_quantizable_weights(module).values():
            weight = getattr(layer, leaf)
            if not weight.requires_grad:
                self.byte_count += weight.nbytes
                kind = layer.weight_formats.get(leaf, ComputeFormat())
                layer.weight_formats = {**layer.weight_formats, leaf: replace(kind, fetch=fetch)}
                yield layer, leaf

    @property
    def window_bytes(self) -> int:
        """Return the bytes on the device for weights on their way."""
        return min(WINDOW_BYTES, self.byte_count)

    def restart_with_last_fetch_order(self) -> None:
        """Expect the order of fetches since the last call again."""
        self._drop_arriving()
        self._order, self._fetched = self._fetched, []

    def fetch(self, stored: Tensor) -> Tensor:
        """Return a storage's copy on the device (any shape), and start to copy the next ones."""
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
        self.transfers.make_computation_wait(ticket)
        return copy

    def close(self) -> None:
        """Release the host memory."""
        self._arriving.clear()
        self.transfers.close()

    def _fits_in_copy_window(self, stored: Tensor) -> bool:
        """Return whether a storage may be on its way with the others."""
        return not self._arriving or sum(copy.nbytes for copy, _ in self._arriving) + stored.nbytes <= WINDOW_BYTES

    def _start_copy(self, stored: Tensor) -> tuple[Tensor, Ticket]:
        copy = torch.empty_like(stored, device=self.device)
        # The allocator may hand out memory that computation still uses.
        return copy, self.transfers.copy_to_device([(copy, stored)], [self.transfers.mark_computation()])

    def _drop_arriving(self) -> None:
        """Drop copies of weights that are not used next; their memory is free when they have arrived."""
        if self._arriving:
            self.transfers.make_computation_wait(self._arriving[-1][1])
            self._arriving.clear()


def check_streamed_weights(nodes: StageNodes) -> Iterator[Problem]:
    """Yield problems for streamed weights if none is frozen, in CUDA graphs, with shards, or rounded to float8."""
    if not nodes.stages.settings["stream_frozen"]:
        return
    if not nodes.freezes_weights:
        text = f"no weight is frozen, since [{nodes.stages.name}] has no adapters"
        yield nodes.stages.problem("stream_frozen", text, "write adapters, or stream_frozen = false")
    float8, precision = nodes.find_feature("float8.training"), nodes.precision
    if float8 and precision and precision.settings["frozen"] == "compute":
        text = "layers that multiply in float8 round weights on the device"
        hint = f'write frozen = "nf4" in [{precision.name}], or remove [{float8.name}]'
        yield nodes.stages.problem("stream_frozen", text, hint)
    if compiled := nodes.find_feature("stages.compiled"):
        text = "torch.compile does not trace copies from host memory"
        yield nodes.stages.problem("stream_frozen", text, f"remove [{compiled.name}], or write stream_frozen = false")
    if captured := nodes.find_feature("pipeline.captured"):
        text = "a CUDA graph has its weights in fixed places on the device"
        yield nodes.stages.problem("stream_frozen", text, f"remove [{captured.name}], or write stream_frozen = false")
    if nodes.sizes.data_shard * nodes.sizes.context > 1:
        text = "weights sharded along data_shard and context are gathered from other ranks' devices"
        hint = f"write stream_frozen = false, or data_shard = 1 and context = 1 in [{nodes.mesh.name}]"
        yield nodes.stages.problem("stream_frozen", text, hint)
