"""
DDP: replicated parameters' gradients are summed over replicas during the last backward pass.

Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704, sections 3.2.3 and 4.2, by block instead of by parameter:
weight gradients are added by the matrix products themselves (`kernels/deferred_grads.py`), without a hook of the
parameter.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any

import attrs
from torch import Tensor, nn

from drawloom.components.parallel.buckets import BucketedSums
from drawloom.components.parallel.gradient_hooks import call_when_gradients_are_final
from drawloom.components.parallel.master_weights import Blocks, ParameterStore
from drawloom.ports import Group, Precision, ReductionUnit, get_or_create_gradient


@attrs.define(eq=False)
class ReplicatedModule:
    """
    A stage's module with all parameters on every rank in a group (DDP).

    A block's gradients are final when the step's last backward pass has computed the block's input gradient; then they
    are added to `sums`. A weight without a gradient contributes zeros, so all ranks send the same tensors.
    """

    sums: BucketedSums
    gathers_per_block: bool = True  # so that the program does not gather the stage
    reduces_per_microbatch: bool = False
    _blocks: list[list[nn.Parameter]] = attrs.field(factory=list)
    _unsent: dict[nn.Parameter, None] = attrs.field(factory=dict)  # trained parameters not yet sent in this step
    _trained: list[nn.Parameter] = attrs.field(factory=list)
    _reduces: bool = False

    def register_blocks_for_gradient_sums(
        self, trained: Iterable[nn.Parameter], module: nn.Module, blocks: Sequence[nn.Module]
    ) -> None:
        """Register a module's trained parameters, whose gradients are summed block by block."""
        self._trained = list(trained)
        # The gradient of a weight with several names, shared by layers, is final only at the end of the pass.
        name_counts = Counter(param for _, param in module.named_parameters(remove_duplicate=False))
        unshared = {param for param in self._trained if name_counts[param] == 1}
        for index, block in enumerate(blocks):
            self._blocks.append([param for param in block.parameters() if param in unshared])
            block.register_forward_pre_hook(partial(self._hook_block_gradient_sum, index))

    def start_unshard(self) -> None:
        """Do nothing: all parameters are on this rank."""

    def reshard(self) -> None:
        """Do nothing: all parameters stay on this rank."""

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """Start to send gradients block by block, as soon as the next backward pass has computed them."""
        if not is_last_in_step:
            raise ValueError(
                "DDP replicas reduce gradients only after the last microbatch; call with is_last_in_step=True"
            )
        self._reduces, self._unsent = True, dict.fromkeys(self._trained)

    def stop_reducing_in_backward(self) -> None:
        """Do nothing: remaining gradients are sent at the end of the step."""

    def list_reduction_units(self) -> list[ReductionUnit]:
        """Return the blocks, last to first, for a pass with weight gradients alone, which calls no input hooks."""
        return [
            ReductionUnit(set(map(id, block)), partial(self._add_unsent_gradients_to_buckets, block))
            for block in reversed(self._blocks)
        ]

    def reduce_remaining_gradients(self) -> None:
        """Send all remaining gradients."""
        self._add_unsent_gradients_to_buckets(list(self._unsent))
        self.sums.start_bucket_sum()

    def list_whole_parameters(self) -> list[nn.Parameter]:
        """Return no parameters: passes compute with the module's own."""
        return []

    def finish_reduction(self) -> None:
        """Send the remaining gradients, and wait for the step's sums, which replace the gradients."""
        if self._reduces:
            self.reduce_remaining_gradients()
        self._reduces = False
        self.sums.wait_and_write_sums()

    def _hook_block_gradient_sum(self, index: int, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """
        Before a block's forward pass, hook its input: once the input's gradient exists, the block's weight gradients
        are sent.
        """
        # A block after frozen blocks is sent at the end of the step.
        return call_when_gradients_are_final(inputs, partial(self._send_block_gradients, index))

    def _send_block_gradients(self, index: int, _grad: Tensor) -> None:
        """Send a block's gradients, if this backward pass is the step's last."""
        if self._reduces:
            self._add_unsent_gradients_to_buckets(self._blocks[index])

    def _add_unsent_gradients_to_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the parameters' unsent gradients to the pending sums."""
        for parameter in parameters:
            if parameter in self._unsent:
                del self._unsent[parameter]
                self.sums.add_to_bucket(get_or_create_gradient(parameter))


@attrs.define(eq=False)
class ReplicatedStore(ParameterStore):
    """Modules' parameters on every rank in a group; `modules` sum the gradients of `parameters_summed_in_backward`."""

    modules: dict[nn.Module, ReplicatedModule] = attrs.field(factory=dict)
    parameters_summed_in_backward: Set[str] = frozenset()

    @classmethod
    def from_replicated_modules(
        cls,
        modules: Sequence[nn.Module],
        blocks: Blocks,
        precision: Precision,
        group: Group,
        bucket_bytes: int,
        excluded: Set[str] = frozenset(),
    ) -> "ReplicatedStore":
        """
        Return a store for modules with real parameters. It sums gradients over the group, except those of parameters
        in `excluded`, of frozen parameters, and of parameters in several modules.
        """
        store = cls.from_modules(modules, precision)
        stage_counts = Counter(name for module in modules for name, _ in module.named_parameters())
        for module in modules:
            # The gradient of a parameter in two stages is final only when both stages are done.
            trained = ((name, param) for name, param in module.named_parameters() if param.requires_grad)
            own = {name: param for name, param in trained if stage_counts[name] == 1 and name not in excluded}
            store.modules[module] = ReplicatedModule(BucketedSums(group, precision.reduce, bucket_bytes))
            store.modules[module].register_blocks_for_gradient_sums(own.values(), module, blocks(module))
            store.parameters_summed_in_backward |= own.keys()
        return store

    def after_backward(self) -> None:
        """Wait for the sums, and move the copies' gradients to the masters."""
        for module in self.modules.values():
            module.finish_reduction()
        super().after_backward()

    def get_shards(self, module: nn.Module) -> ReplicatedModule:
        """Return the replicated module for `module`."""
        return self.modules[module]
