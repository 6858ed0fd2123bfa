"""
What a rank holds of sharded parameters, by their shapes: the memory of `ShardedStore` without ranks, for plans.

FSDP2 gives rank r of n the r-th of n parts of the first dimension, all but the last ones of the same size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import attrs
from torch import Tensor, nn

from drawloom.components.parallel.data_shard import heads_of, whole_parameters
from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.parallel.master_weights import Blocks, ParameterStore
from drawloom.components.ports.distributed import Group, Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.slices import TensorSlice


@attrs.frozen
class GatheredBytes:
    """Bytes of a stage's parameters that are sharded, as layers compute with them: outside of blocks, and by block."""

    root: int
    blocks: Sequence[int]

    def at_once(self, by_block: bool) -> int:
        """The most that is gathered at one time; of blocks the one in use and the next."""
        return self.root + (2 * max(self.blocks, default=0) if by_block else sum(self.blocks))


@attrs.define(eq=False)
class SlicedStore(ParameterStore):
    """
    The parameters of modules on the meta device, of which this rank would have slices; `masters` have their shapes.

    The modules keep whole parameters, in the dtype in which layers compute: what they have gathered when they run.
    """

    slices: Mapping[str, TensorSlice] = attrs.field(factory=dict)
    gathered: Sequence[GatheredBytes] = ()
    by_block: bool = True
    _held: Mapping[Tensor, int] = attrs.field(factory=dict)

    @classmethod
    def sliced(
        cls,
        modules: Sequence[nn.Module],
        blocks: Blocks,
        ranks: Group,
        precision: Precision,
        by_block: bool,
        of_experts: Set[str] = frozenset(),
        expert_ranks: int = 1,
    ) -> "SlicedStore":
        """Slice parameters of meta modules, in `precision.parameter`; those `of_experts` over `expert_ranks`."""
        whole = whole_parameters(modules, precision, frozenset() if expert_ranks > 1 else of_experts)
        masters: dict[str, nn.Parameter] = {}
        slices: dict[str, TensorSlice] = {}
        held: dict[Tensor, int] = {}
        for module, apart in zip(modules, whole, strict=True):
            for name, parameter in module.named_parameters():
                if parameter in apart:
                    continue
                among = expert_ranks if name in of_experts else ranks.size
                place = _slice(tuple(parameter.shape), among, ranks.rank % among)
                masters[name] = nn.Parameter(parameter.detach().new_empty(place.size), parameter.requires_grad)
                slices[name], held[parameter] = place, masters[name].nbytes
                parameter.data = parameter.data.to(precision.compute)
                if parameter.requires_grad:
                    parameter.grad_dtype = precision.gradient
        # Those that are whole are cast as without shards; the others are in the dtype of layers by now.
        store = cls.of(modules, precision)
        store.masters = {**store.masters, **masters}
        store.slices, store.by_block, store._held = slices, by_block, held
        store.gathered = [_gathered(module, blocks(module), held) for module in modules]
        return store

    def held_bytes(self, tensor: Tensor) -> int:
        """Bytes of this rank's slice of a tensor of any shape."""
        return self._held.get(tensor, tensor.nbytes)

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of masters that have copies, and of these copies and what is gathered at one time."""
        whole = super().memory_bytes()
        gathered = sum(each.at_once(self.by_block) for each in self.gathered)
        return {**whole, "compute_copies": whole["compute_copies"] + gathered}


def _slice(shape: tuple[int, ...], ranks: int, rank: int) -> TensorSlice:
    """The part of a parameter of one of several ranks."""
    each = -(-shape[0] // ranks)
    first = min(rank * each, shape[0])
    size = (min(each, shape[0] - first), *shape[1:])
    return TensorSlice(shape, (first, *[0] * (len(shape) - 1)), size)


def _gathered(module: nn.Module, blocks: Sequence[nn.Module], sharded: Mapping[Tensor, int]) -> GatheredBytes:
    sizes = [sum(each.nbytes for each in block.parameters() if each in sharded) for block in blocks]
    every = sum(each.nbytes for each in module.parameters() if each in sharded)
    return GatheredBytes(every - sum(sizes), sizes)


def largest_unit(module: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """The most trained elements of a unit that is reduced by itself: a block, its experts, a head, or what is left."""
    sizes = Counter({id(module): sum(each.numel() for each in module.parameters() if each.requires_grad)})
    for block in (*blocks, *heads_of(module)):
        experts = [part for part in block.modules() if isinstance(part, ExpertParallel)]
        inside = sum(each.numel() for part in experts for each in part.parameters() if each.requires_grad)
        whole = sum(each.numel() for each in block.parameters() if each.requires_grad)
        sizes[id(module)] -= whole
        sizes[id(block)] = max(inside, whole - inside)
    return max(sizes.values())
