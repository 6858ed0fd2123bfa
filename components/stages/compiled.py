"""torch.compile for blocks, one by one."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn

from drawloom import NodeView, Problem, component
from drawloom.components.parallel.split_experts import ExpertParallel
from drawloom.ports import Kernels, StageFeature, StageNodes, WrappingOrder


@component
class CompiledBlocks(StageFeature):
    """
    torch.compile for every block; blocks of one kind share the result.

    A schedule can't delay a compiled block's weight gradients, and torch chooses what a block recomputes, unless
    `recompute` recomputes all of it.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.COMPILATION
    keeps_layer_shapes: ClassVar[bool] = True
    fuses_backward: ClassVar[bool] = True

    kernels: Kernels

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Warn about recompute policies ignored by compiled blocks."""
        text = "torch chooses what compiled blocks recompute, so '{}' only applies outside them"
        if (policy := nodes.stages.settings.get("recompute")) in ("selective", "quantized"):
            hint = f'write recompute = "blocks" or "none", or remove [{feature.name}]'
            yield nodes.stages.warning("recompute", text.format(policy), hint)
        for schedule in nodes.stages.neighbours("schedule"):
            if "selective" in (schedule.settings.get("recompute") or ()):
                hint = f"leave recompute.selective out, or remove [{feature.name}]"
                yield schedule.warning("recompute", text.format("selective"), hint)

    def open(self) -> None:
        """Import all kernels, because torch.compile can't follow an import."""
        self.kernels.import_operations()

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            for part in block.modules():
                # The number of tokens from other ranks is known only at run time.
                if isinstance(part, ExpertParallel) and part.dispatcher is not None:
                    part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
            # Compile `forward` instead of the module, so that hooks, such as FSDP's, stay outside of the compiled code.
            block.forward = torch.compile(block.forward)
