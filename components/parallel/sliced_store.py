"""
Sizes of this rank's parameter slices: `ShardedStore`'s memory without other ranks, for plans.

Rank r has the r-th of n parts of the first dimension; all but the last parts have the same size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import attrs
from torch import Tensor, nn

from drawloom.components.parallel.data_shard import find_untied_heads, slice_rows
from drawloom.components.parallel.fsdp import find_unsharded_parameters
from drawloom.components.parallel.master_weights import Blocks, ParameterStore
from drawloom.components.parallel.split_experts import ExpertParallel
from drawloom.ports import Group, MemoryKind, Precision, TensorSlice


@attrs.frozen
class GatheredBytes:
    """Bytes of a stage's sharded parameters in the layers' dtype: outside blocks, and by block."""

    root: int
    blocks: Sequence[int]

    def peak_bytes(self, gathers_per_block: bool) -> int:
        """Return the most bytes gathered at one time; among blocks, the one in use and the next."""
        return self.root + (2 * max(self.blocks, default=0) if gathers_per_block else sum(self.blocks))


@attrs.define(eq=False)
class SlicedStore(ParameterStore):
    """
    Meta modules' parameters, with `masters` shaped like this rank's slices.

    The modules keep whole parameters, in the layers' dtype, like gathered parameters.
    """

    slices: Mapping[str, TensorSlice] = attrs.field(factory=dict)
    gathered: Sequence[GatheredBytes] = ()
    gathers_per_block: bool = True
    _local_bytes: Mapping[Tensor, int] = attrs.field(factory=dict)

    @classmethod
    def from_sliced_modules(
        cls,
        modules: Sequence[nn.Module],
        blocks: Blocks,
        group: Group,
        precision: Precision,
        gathers_per_block: bool,
        experts: Set[str] = frozenset(),
        expert_ranks: int = 1,
    ) -> "SlicedStore":
        """Slice meta modules' parameters, in `precision.parameter`; `experts` over `expert_ranks` ranks."""
        whole_by_module = find_unsharded_parameters(modules, precision, frozenset() if expert_ranks > 1 else experts)
        masters: dict[str, nn.Parameter] = {}
        slices: dict[str, TensorSlice] = {}
        local_bytes: dict[Tensor, int] = {}
        for module, whole in zip(modules, whole_by_module, strict=True):
            for name, parameter in module.named_parameters():
                if parameter in whole:
                    continue
                shards = expert_ranks if name in experts else group.size
                tensor_slice = slice_rows(tuple(parameter.shape), shards, group.rank % shards)
                masters[name] = nn.Parameter(parameter.detach().new_empty(tensor_slice.size), parameter.requires_grad)
                slices[name], local_bytes[parameter] = tensor_slice, masters[name].nbytes
                parameter.data = parameter.data.to(precision.compute)
                if parameter.requires_grad:
                    parameter.grad_dtype = precision.gradient
        # `from_modules` casts whole parameters as without shards; sharded ones already have the dtype of layers.
        store = cls.from_modules(modules, precision)
        store.masters = {**store.masters, **masters}
        store.slices, store.gathers_per_block, store._local_bytes = slices, gathers_per_block, local_bytes
        store.gathered = [_count_gathered_bytes_by_block(module, blocks(module), local_bytes) for module in modules]
        return store

    def local_bytes(self, tensor: Tensor) -> int:
        """Return the bytes in this rank's slice of a tensor (any shape)."""
        return self._local_bytes.get(tensor, tensor.nbytes)

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return three byte counts: masters with copies, these copies, and the parameters gathered at one time."""
        whole = super().device_bytes()
        gathered = sum(stage.peak_bytes(self.gathers_per_block) for stage in self.gathered)
        return {**whole, "compute_copies": whole["compute_copies"] + gathered}


def _count_gathered_bytes_by_block(
    module: nn.Module, blocks: Sequence[nn.Module], sharded: Mapping[Tensor, int]
) -> GatheredBytes:
    """Return the bytes of a module's sharded parameters while gathered: outside blocks, and by block."""
    sizes = [sum(param.nbytes for param in block.parameters() if param in sharded) for block in blocks]
    total = sum(param.nbytes for param in module.parameters() if param in sharded)
    return GatheredBytes(total - sum(sizes), sizes)


def count_largest_unit(module: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return the most trained elements in a reduction unit: a block, its experts, a head, or the rest of the module."""
    sizes = Counter({id(module): _count_trained_elements(module)})
    for block in (*blocks, *find_untied_heads(module)):
        in_experts = sum(_count_trained_elements(part) for part in block.modules() if isinstance(part, ExpertParallel))
        in_block = _count_trained_elements(block)
        sizes[id(module)] -= in_block
        sizes[id(block)] = max(in_experts, in_block - in_experts)
    return max(sizes.values())


def _count_trained_elements(module: nn.Module) -> int:
    """Return the number of trained elements in a module."""
    return sum(param.numel() for param in module.parameters() if param.requires_grad)
