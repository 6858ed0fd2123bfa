"""
Gradients of parameters that every replica has whole: summed over replicas while the last backward pass computes others.

Li et al. 2020, "PyTorch Distributed", arXiv 2006.15704, sections 3.2.3 and 4.2, with blocks in the place of parameters:
weight gradients are added by the products themselves (`kernels/deferred_grads.py`), which no hook of a parameter sees.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.buckets import BucketedSums
from drawloom.components.parallel.dimension import Dimension, SharedParameters
from drawloom.components.parallel.master_weights import Blocks, ParameterStore
from drawloom.components.ports.distributed import Group, Precision
from drawloom.components.ports.stages import ReducedPart, gradient_of
from drawloom.components.state.trees import leaves


@attrs.define(eq=False)
class DataReplicateDimension(Dimension):
    """Ranks with the same parameters and other rows (DDP); with shards, HSDP."""

    name: ClassVar[str] = "data_replicate"

    def owned_elsewhere(self, parameters: SharedParameters) -> Set[str]:
        # Several replicas hold one copy of the experts together where `expert` is larger than a replica.
        replicas_of_a_copy = self.mesh.sizes.data_replicate // self.mesh.replicas.size
        if self.mesh.indices.data_replicate % replicas_of_a_copy:
            return parameters.trained.keys() - parameters.experts
        return frozenset()

    def sum_gradients(self, parameters: SharedParameters) -> None:
        """Sum the gradients of dense parameters over all ranks with other tokens: replicas, shards and contexts."""
        left = [name for name in parameters.trained if name not in parameters.summed | parameters.experts]
        parameters.sum_named(left, self.mesh.data_group)


@attrs.define(eq=False)
class ReplicatedModule:
    """
    A stage's module of which each rank of a group has all parameters.

    The gradients of a block are final when the step's last backward pass has computed that of the block's input, and
    are added to `sums` then. A weight without a gradient takes part with zeros, so that all ranks send the same.
    """

    sums: BucketedSums
    by_block: bool = True  # nothing is gathered
    by_microbatch: bool = False
    _blocks: list[list[nn.Parameter]] = attrs.field(factory=list)
    _left: dict[nn.Parameter, None] = attrs.field(factory=dict)  # trained, and not sent in this step; in order
    _all: list[nn.Parameter] = attrs.field(factory=list)
    _reduces: bool = False

    def add(self, trained: Iterable[nn.Parameter], module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Sum the gradients of these parameters of a module, of which some are in blocks."""
        self._all = list(trained)
        # A weight with several names, as of layers that share it, is final at the end only.
        times = Counter(each for _, each in module.named_parameters(remove_duplicate=False))
        known = {each for each in self._all if times[each] == 1}
        for number, block in enumerate(blocks):
            self._blocks.append([each for each in block.parameters() if each in known])
            block.register_forward_pre_hook(partial(self._watch, number))

    def unshard(self) -> None:
        """Nothing: all parameters are there."""

    def reshard(self) -> None:
        """Nothing: all parameters stay."""

    def reduce_next(self, final: bool) -> None:
        """With the next backward pass the step's gradients are final: each block's are sent as soon as they are."""
        if not final:
            raise ValueError("replicas have nothing to reduce before the last microbatch")
        self._reduces, self._left = True, dict.fromkeys(self._all)

    def reduced(self) -> None:
        """Nothing: what was not sent is sent at the end of the step."""

    def parts(self) -> list[ReducedPart]:
        """The blocks, the last one first, for a pass for the weights alone, which calls no hook of a block's input."""
        return [ReducedPart(set(map(id, block)), partial(self._send, block)) for block in reversed(self._blocks)]

    def reduce(self) -> None:
        """Send all gradients that have not been sent."""
        self._send(list(self._left))
        self.sums.flush()

    def finish(self) -> None:
        """Wait for the sums of the step, which become the gradients."""
        if self._reduces:
            self.reduce()
        self._reduces = False
        self.sums.finish()

    def _watch(self, number: int, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Register at the input of a block what is to be done when its gradient is known."""
        if not torch.is_grad_enabled():
            return
        # Autograd adds the weight gradients of a block before it runs the node that made the block's input. A leaf,
        # such as the input of a stage, has no such node, and its hook may run before the last gradients are added. So
        # the first block of a stage is sent at the end of the step, and so is a block behind frozen ones.
        tensors = (leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        if (hidden := next(tensors, None)) is not None:
            hidden.register_hook(partial(self._block_done, number))  # type: ignore[no-untyped-call]

    def _block_done(self, number: int, _grad: Tensor) -> None:
        if self._reduces:
            self._send(self._blocks[number])

    def _send(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self._left:
                del self._left[parameter]
                self.sums.add(gradient_of(parameter))


@attrs.define(eq=False)
class ReplicatedStore(ParameterStore):
    """The parameters of modules that every rank of a group has whole; `summed` are those that `modules` sum."""

    modules: dict[nn.Module, ReplicatedModule] = attrs.field(factory=dict)
    summed: Set[str] = frozenset()

    @classmethod
    def replicated(
        cls,
        modules: Sequence[nn.Module],
        blocks: Blocks,
        precision: Precision,
        group: Group,
        bucket_bytes: int,
        apart: Set[str] = frozenset(),
    ) -> "ReplicatedStore":
        """Take over real parameters as `of` does; gradients are summed over the group, but for those named `apart`."""
        store = cls.of(modules, precision)
        times = Counter(name for module in modules for name, _ in module.named_parameters())
        for module in modules:
            # A parameter of two stages is done when both are.
            trained = ((name, each) for name, each in module.named_parameters() if each.requires_grad)
            own = {name: each for name, each in trained if times[name] == 1 and name not in apart}
            store.modules[module] = ReplicatedModule(BucketedSums(group, precision.reduce, bucket_bytes))
            store.modules[module].add(own.values(), module, blocks(module))
            store.summed |= own.keys()
        return store

    def hand_over_gradients(self) -> None:
        """Wait for the sums, and make the copies' gradients those of the masters."""
        for module in self.modules.values():
            module.finish()
        super().hand_over_gradients()

    def shards_of(self, module: nn.Module) -> ReplicatedModule:
        """What sums the gradients of one of the modules."""
        return self.modules[module]
