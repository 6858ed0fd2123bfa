"""Inputs of recomputed blocks in host memory, between their forward and backward passes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from mmap import mmap
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, component, internal
from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.components.pipeline.runtime.offloads import OffloadedTensors, Offloads
from drawloom.components.state.trees import list_leaves
from drawloom.kernels.host_copies import trace_copy_on_meta
from drawloom.kernels.recompute.saved_tensors import Collecting
from drawloom.ports import Copies, Device, StageFeature, StageNodes, Ticket


@component(impact="safe")
class OffloadedInputs(StageFeature):
    """
    Inputs of recomputed blocks in host memory: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 6.1.

    A block's input is copied to the host during the next block's forward pass, and back during the next block's
    backward pass, so that two inputs are on the device at a time, and gradients keep their bits.
    """

    excludes: ClassVar[Mapping[str, str]] = {
        "pipeline.captured": "a CUDA graph has its tensors in fixed places on the device",
        "pipeline.offloaded": "it moves the same tensors",
        "planning.memory": "the policy chooses what is kept, recomputed and offloaded",
    }
    keeps_layer_shapes: ClassVar[bool] = True

    device: Device
    _transfers: DeviceTransfers | None = internal(None)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem unless the stages recompute all blocks."""
        if nodes.stages.settings["recompute"] != "blocks":
            text = "only recomputed blocks keep nothing but their inputs"
            yield feature.problem("use", text, f'write recompute = "blocks" in [{nodes.stages.name}]')

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        self._transfers = DeviceTransfers(self.device.device)
        _add_hooks(modules, blocks, Offloads(self._transfers))

    def place_on_meta(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        _add_hooks(modules, blocks, Offloads(PlannedTransfers()))

    def close(self) -> None:
        """Release the host memory."""
        if self._transfers is not None:
            self._transfers.close()


def _add_hooks(modules: Sequence[nn.Module], blocks: Sequence[nn.Module], offloads: Offloads) -> None:
    """Let the inputs of every module's blocks leave, except for the last one's, whose backward pass is the next."""
    for module in modules:
        inside, moves = set(module.modules()), _Moves(offloads)
        own = [block for block in blocks if block in inside]
        for block in own:
            block.register_forward_pre_hook(partial(moves.begin, is_first=block is own[0]))
            block.register_forward_hook(
                partial(moves.end, leaves=block is not own[-1]), with_kwargs=True, always_call=True
            )


@attrs.define(eq=False)
class _Moves:
    """
    Moves of the inputs of a module's blocks, as hooks of their forward passes.

    `_last` is the input that left last, in this forward pass.
    """

    offloads: Offloads
    _collecting: Collecting | None = None
    _last: OffloadedTensors | None = None

    def begin(self, _block: nn.Module, _arguments: Any, *, is_first: bool) -> None:
        """Begin to collect a block's kept tensors: its input."""
        if is_first:
            self._last = None
        if torch.is_grad_enabled():
            self._collecting = Collecting().__enter__()

    def end(self, _block: nn.Module, arguments: Any, named: Mapping[str, Any], output: Any, *, leaves: bool) -> None:
        """Free the memory of the input before, and start to copy this block's."""
        if self._collecting is None:
            return
        collecting, self._collecting = self._collecting, None
        collecting.__exit__()
        results = [leaf for leaf in list_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not results:
            return
        before, self._last = self._last, None
        if before is not None:
            before.free_device_memory()
        if leaves:
            # Blocks share their other arguments, such as positions.
            shared = [value for value in (*arguments[1:], *named.values()) if isinstance(value, Tensor)]
            self._last = self.offloads.start_offload(collecting.kept, shared)
        results[0].register_hook(partial(_begin_backward, self._last, before))  # type: ignore[no-untyped-call]


def _begin_backward(own: OffloadedTensors | None, before: OffloadedTensors | None, _gradient: Tensor) -> None:
    """Wait for a block's input, and start to copy the input of the block before, whose backward pass is the next."""
    if own is not None:
        own.reload()  # unless the next block did
        own.wait_for_reload()
    if before is not None:
        before.reload()


@attrs.frozen
class PlannedTransfers:
    """Transfers between the meta device and host memory, which is reserved but never used; copies take their time."""

    def allocate_pinned_host_memory(self, size: int) -> Tensor:
        return torch.frombuffer(mmap(-1, size), dtype=torch.uint8)  # no operation, so that no recorder counts it

    def copy_to_device(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        for target, _ in copies:
            trace_copy_on_meta(target)

    def copy_to_host(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        for _, source in copies:
            trace_copy_on_meta(source)

    def mark_computation(self) -> Ticket:
        """Return a point in the past."""

    def make_computation_wait(self, ticket: Ticket) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Return at once."""
