"""
FSDP: every rank keeps a slice of every parameter, and gathers a block's parameters to compute with it (ZeRO-3).

The design follows torch's `fully_shard` (FSDP2; Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277), but its hooks
assume one forward and one backward pass at a time. A pipeline's program has several microbatches in flight and may
split a backward pass, so the program announces when gradients are final; until then every rank accumulates its own, as
without shards.

For plans, `SlicedStore` has the sizes of this rank's slices, as `ShardedStore` without other ranks. Rank r has the r-th
of n parts of the first dimension; all but the last parts have the same size.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.data_shard import find_untied_heads, get_local_slice, slice_rows
from drawloom.components.parallel.gradient_hooks import call_when_gradients_are_final
from drawloom.components.parallel.master_weights import Blocks, ParameterStore, choose_layer_dtype
from drawloom.components.parallel.shard_unit import (
    ShardedParameter,
    ShardGroups,
    ShardUnit,
    StartedReduction,
    UnitDtypes,
    choose_gradient_message_dtype,
    count_gathered_bytes,
)
from drawloom.components.parallel.split_experts import ExpertParallel
from drawloom.components.state.trees import list_leaves
from drawloom.ports import (
    LOSS,
    Group,
    MemoryKind,
    Precision,
    ReductionUnit,
    TensorSlice,
    WeightCopies,
    adapter_parameter_names,
    is_dtensor,
)


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


@attrs.define(eq=False)
class ShardedModule:
    """
    A stage's module with sharded parameters (FSDP).

    FSDP units are: the module, for parameters outside all other units; an untied head, which is gathered while the last
    block computes and whose gradient is reduced first; every block; and in a block its experts, if they are sharded
    over other ranks than the rest.

    With `gathers_per_block`, a block is gathered when it is used and freed afterwards, in forward and backward; the
    next block is gathered meanwhile. Otherwise the program gathers the whole stage before its first use in a step, and
    frees it when it reduces the gradients. With `reduces_per_microbatch`, gradients are reduced after every microbatch,
    so only one microbatch's gradients are unsharded.
    """

    module: nn.Module
    root: ShardUnit
    heads: Sequence[ShardUnit]
    blocks: Sequence[Sequence[ShardUnit]]
    gathers_per_block: bool
    reduces_per_microbatch: bool = False
    _reduces: bool = False
    _is_last_in_step: bool = False
    _unreduced: dict[ShardUnit, None] = attrs.field(factory=dict)
    _reductions: list[StartedReduction] = attrs.field(factory=list)
    _blocks_with_backward: set[int] = attrs.field(factory=set)

    @classmethod
    def shard(
        cls,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        unsharded: set[nn.Parameter],
        *,
        groups: ShardGroups,
        expert_groups: ShardGroups | None,
        dtypes: UnitDtypes,
        gathers_per_block: bool,
        reduces_per_microbatch: bool,
    ) -> "ShardedModule":
        """
        Shard a module's parameters, except for the parameters in `unsharded`.

        Experts are sharded over `expert_groups`, if there are some.
        """
        heads = find_untied_heads(module)
        parts = [
            [block, *(part for part in block.modules() if expert_groups and isinstance(part, ExpertParallel))]
            for block in blocks
        ]
        owners_by_part = _group_owners_by_part(module, [*heads, *chain(*parts)], unsharded)

        def create_unit(part: nn.Module) -> ShardUnit:
            is_dense = expert_groups is None or not isinstance(part, ExpertParallel)
            own = groups if is_dense or expert_groups is None else expert_groups
            parameters = [
                ShardedParameter.shard(parameter, owners, own.mesh)
                for parameter, owners in owners_by_part[part].items()
            ]
            return ShardUnit(parameters, own, dtypes)

        sharded = cls(
            module,
            create_unit(module),
            [*map(create_unit, heads)],
            [[*map(create_unit, block_parts)] for block_parts in parts],
            gathers_per_block,
            reduces_per_microbatch,
        )
        sharded._register_hooks(heads, blocks)
        return sharded

    def _register_hooks(self, heads: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        """Let passes of the module gather parameters, and reduce gradients."""
        self.module.register_forward_pre_hook(self._gather_root)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._gather_block, index))
            if self.gathers_per_block:
                block.register_forward_hook(partial(self._free_block_after_forward, index))
        for unit, head in zip(self.heads, heads, strict=True):
            head.register_forward_pre_hook(partial(self._gather_head, unit))
            layer: Any = head
            # Losses call this method instead of the module, so that no hook runs.
            layer.finish_with_head = partial(self._gather_and_finish_with_head, unit, layer.finish_with_head)

    @property
    def units(self) -> list[ShardUnit]:
        """All units, outer ones before inner ones."""
        return [self.root, *self.heads, *chain(*self.blocks)]

    def drop_gathered_and_delay_reduction(self) -> None:
        """Drop parameters gathered from old slices; reduce gradients only after `reduce_in_next_backward`."""
        self.reshard()
        self._reduces = False

    def start_unshard(self) -> None:
        """Start to gather the whole stage in order; a part of the forward pass waits for its own parameters."""
        for unit in (self.root, *chain(*self.blocks), *self.heads):
            unit.start_gather()

    def reshard(self) -> None:
        for unit in self.units:
            unit.free()

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """
        Reduce gradients block by block, as soon as the next backward pass has computed them.

        The reduced gradients are added to the slices' gradients. Before the step's last reduction (`is_last_in_step`),
        they are not summed over replicas, and the stage's gathered parameters stay.
        """
        self._reduces, self._is_last_in_step = True, is_last_in_step
        # Heads first, because they are large; the root last, because the embedding's gradient is last.
        self._unreduced = dict.fromkeys((*self.heads, *reversed([*chain(*self.blocks)]), self.root))

    def stop_reducing_in_backward(self) -> None:
        """Reduce the remaining gradients, wait for the sums, and accumulate gradients on this rank again."""
        if self._reduces:
            self.reduce_remaining_gradients()
        self._reduces = False

    def finish_reduction(self) -> None:
        """Do as `stop_reducing_in_backward`, since it waits for the sums."""
        self.stop_reducing_in_backward()

    def list_whole_parameters(self) -> list[nn.Parameter]:
        """Return the parameters in their gathered form."""
        return [parameter.unsharded for unit in self.units for parameter in unit.parameters]

    def list_reduction_units(self) -> list[ReductionUnit]:
        """Return the units, for a pass with weight gradients alone, which calls no input hooks."""
        return [
            ReductionUnit({id(param.unsharded) for param in unit.parameters}, partial(self._reduce, unit))
            for unit in self._unreduced
        ]

    def reduce_remaining_gradients(self) -> None:
        """Reduce all remaining gradients, and wait for the sums; on a GPU only the stream waits."""
        for unit in list(self._unreduced):
            self._reduce(unit)
        while self._reductions:
            self._continue_reductions()

    def peak_gathered_bytes(self) -> int:
        """Return the most bytes gathered at one time; among blocks, the one in use and the next."""
        block_bytes = [count_gathered_bytes(units) for units in self.blocks]
        other_bytes = count_gathered_bytes((self.root, *self.heads))
        return other_bytes + (2 * max(block_bytes, default=0) if self.gathers_per_block else sum(block_bytes))

    def named_sharded_parameters(self) -> Iterator[tuple[str, ShardedParameter]]:
        """Yield the sharded parameters with their names in the module, in its order; while they are not gathered."""
        by_tensor = {parameter.sharded: parameter for unit in self.units for parameter in unit.parameters}
        for name, tensor in self.module.named_parameters():
            if tensor in by_tensor:
                yield name, by_tensor[tensor]

    def _gather_root(self, _module: nn.Module, _inputs: Any) -> None:
        """Before a forward pass, gather the parameters outside blocks, and start with the first block's."""
        self.root.gather()
        self._start_block_gather(0)

    def _gather_block(self, index: int, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """
        Before a block's forward pass, gather its parameters, and start to gather the next block while this one
        computes. Once the gradient of the block's input exists, its weights' gradients are final.
        """
        for unit in self.blocks[index]:
            unit.gather()
        self._start_block_gather(index + 1)
        return call_when_gradients_are_final(inputs, partial(self._end_block_backward, index))

    def _free_block_after_forward(self, index: int, _block: nn.Module, _inputs: Any, outputs: Any) -> None:
        """After a block's forward pass, free its parameters, and let its backward pass gather them again."""
        for unit in self.blocks[index]:
            unit.free()
        if not torch.is_grad_enabled():
            return
        self._blocks_with_backward.discard(index)
        for leaf in list_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._blocks_with_backward.add(index)
                leaf.register_hook(partial(self._gather_block_in_backward, index))  # type: ignore[no-untyped-call]

    def _gather_block_in_backward(self, index: int, _grad: Tensor) -> None:
        """Before a block's backward pass, gather its parameters; usually the pass of the block after it has started."""
        if index + 1 == len(self.blocks) or self.blocks[index + 1][0].state == "freed":
            for unit in self.blocks[index]:
                unit.start_gather()
            self._start_gather_before(index)
        for unit in self.blocks[index]:
            unit.gather()

    def _end_block_backward(self, index: int, _grad: Tensor) -> None:
        """After a block's backward pass, reduce its gradients if they are final, and free its parameters."""
        for unit in reversed(self.blocks[index]):
            if self._reduces:
                self._reduce(unit)
            elif self.gathers_per_block:
                unit.free()
        if self.gathers_per_block:
            # The block before it is gathered already, and computes next.
            self._start_gather_before(index - 1)

    def _start_gather_before(self, index: int) -> None:
        """Start to gather the block before block `index`, if it has a backward pass."""
        if index - 1 in self._blocks_with_backward:
            for unit in self.blocks[index - 1]:
                unit.start_gather()

    def _start_block_gather(self, index: int) -> None:
        """Start to gather a block, or after the last one the heads."""
        for unit in self.blocks[index] if index < len(self.blocks) else self.heads:
            unit.start_gather()

    def _gather_head(self, unit: ShardUnit, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a head's forward pass, gather its parameters; its gradient is final before its input's exists."""
        unit.gather()
        return call_when_gradients_are_final(inputs, partial(self._end_head_backward, unit))

    def _gather_and_finish_with_head(self, unit: ShardUnit, finish_with_head: Any, hidden: Any, finish: Any) -> Any:
        (hidden,) = self._gather_head(unit, self.module, (hidden,))
        return finish_with_head(hidden, finish)

    def _end_head_backward(self, unit: ShardUnit, _grad: Tensor) -> None:
        """After a head's backward pass, reduce its gradient if it is final."""
        if self._reduces:
            self._reduce(unit)

    def _reduce(self, unit: ShardUnit) -> None:
        """Start to reduce a unit's gradients, once, and free its parameters if they are no longer used."""
        if unit not in self._unreduced:
            return
        del self._unreduced[unit]
        self._continue_reductions()  # so that few gradients are in messages at a time
        if unit.trained:
            self._reductions.append(unit.start_reduction(over_replicas=self._is_last_in_step))
        if self._is_last_in_step or (self.gathers_per_block and unit is not self.root and unit not in self.heads):
            unit.free()

    def _continue_reductions(self) -> None:
        """Wait for started reductions' collectives, and start their next ones."""
        self._reductions = [reduction for reduction in self._reductions if reduction.wait_and_continue()]


@attrs.define(eq=False)
class ShardedStore(WeightCopies):
    """
    The parameters of modules on one rank, sharded over ranks; `masters` are this rank's slices, as plain parameters.

    `slices` has the position of each slice in its whole parameter. Parameters without an entry are whole on every rank:
    a loss's and adapters' parameters, parameters without a cast (FSDP gathers one dtype at a time), and parameters
    shared by two local stages.
    """

    modules: Sequence[ShardedModule]
    masters: dict[str, nn.Parameter]
    slices: Mapping[str, TensorSlice]
    _whole: ParameterStore
    _gathered_at: list[int] = attrs.field(factory=list)

    @classmethod
    def from_modules(cls, modules: Sequence[ShardedModule], precision: Precision) -> "ShardedStore":
        """Take over sharded modules whose parameters have memory and values."""
        whole = ParameterStore.from_modules((sharded.module for sharded in modules), precision)
        masters, slices = dict(whole.masters), dict[str, TensorSlice]()
        for sharded in modules:
            for unit in sharded.units:
                unit.create_parameters(precision.gradient)
            # Optimizers, clippers and stagers need not know about shards: they see plain parameters.
            for name, parameter in sharded.named_sharded_parameters():
                masters[name], slices[name] = parameter.master, parameter.tensor_slice
        return cls(modules, masters, slices, whole)

    def before_passes(self, only_if_changed: bool = False) -> None:
        """
        Begin a step: cast the unsharded parameters, and drop gathered ones, which would be old.

        With `only_if_changed`, only if a parameter may have changed.
        """
        self._whole.before_passes(only_if_changed)
        versions = [self.masters[name]._version for name in self.slices]
        if not (only_if_changed and versions == self._gathered_at):
            for module in self.modules:
                module.drop_gathered_and_delay_reduction()
        self._gathered_at = versions

    def after_backward(self) -> None:
        """End the reductions, adding to the slices' gradients, and move the other parameters' gradients."""
        self._whole.after_backward()
        for module in self.modules:
            module.stop_reducing_in_backward()
        # Fused optimizers change parameters without a new version number.
        self._gathered_at = []

    def local_bytes(self, tensor: Tensor) -> int:
        """Return the bytes in this rank's slice of a tensor (any shape)."""
        return get_local_slice(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes

    @property
    def parameters_summed_in_backward(self) -> Set[str]:
        """The parameters whose gradients are reduced in backward passes."""
        return self.slices.keys()

    @property
    def compute_copy_bytes(self) -> int:
        """Bytes of the compute copies among the modules' parameters."""
        return self._whole.compute_copy_bytes

    def get_shards(self, module: nn.Module) -> ShardedModule:
        """Return one module's shards."""
        return next(sharded for sharded in self.modules if sharded.module is module)

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return three byte counts: masters with copies, these copies, and the parameters gathered at one time."""
        whole = self._whole.device_bytes()
        gathered = sum(module.peak_gathered_bytes() for module in self.modules)
        return {**whole, "compute_copies": whole["compute_copies"] + gathered}


def shard_with_fsdp(
    modules: Iterable[nn.Module],
    blocks: Blocks,
    mesh: Any,
    precision: Precision,
    gathers_per_block: bool,
    reduces_per_microbatch: bool = False,
    experts: Set[str] = frozenset(),
    expert_mesh: Any = None,
) -> list[ShardedModule]:
    """
    Shard modules over a torch mesh's ranks.

    A two-dimensional mesh has replicas along the first dimension (HSDP); gradient slices are summed over them, too.
    `experts` are expert ranks' slices: they are sharded over `expert_mesh`, or not at all.
    """
    modules = list(modules)
    dtypes = UnitDtypes(
        gathered=precision.compute, message=choose_gradient_message_dtype(precision, replicas=mesh.ndim > 1)
    )
    whole_by_module = find_unsharded_parameters(modules, precision, experts if expert_mesh is None else frozenset())
    return [
        ShardedModule.shard(
            module,
            blocks(module),
            whole,
            groups=ShardGroups.from_torch_mesh(mesh),
            expert_groups=None if expert_mesh is None else ShardGroups.from_torch_mesh(expert_mesh),
            dtypes=dtypes,
            gathers_per_block=gathers_per_block,
            reduces_per_microbatch=reduces_per_microbatch,
        )
        for module, whole in zip(modules, whole_by_module, strict=True)
    ]


def _group_owners_by_part(
    module: nn.Module, parts: Sequence[nn.Module], unsharded: set[nn.Parameter]
) -> dict[nn.Module, dict[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """
    Return by part, and for the rest of the module, the sharded parameters with their modules and names.

    A parameter belongs to the innermost part around it; parameters of several parts belong to the module itself.
    """
    part_of = dict.fromkeys(module.modules(), module)
    for part in parts:  # outer ones before inner ones
        part_of |= dict.fromkeys(part.modules(), part)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in unsharded:
                owners.setdefault(parameter, []).append((owner, name))
    grouped: dict[nn.Module, dict[nn.Parameter, list[tuple[nn.Module, str]]]] = {part: {} for part in (module, *parts)}
    for parameter, places in owners.items():
        own_parts = {part_of[owner] for owner, _ in places}
        grouped[own_parts.pop() if len(own_parts) == 1 else module][parameter] = places
    return grouped


def find_unsharded_parameters(
    modules: Sequence[nn.Module], precision: Precision, expert_names: Set[str]
) -> list[set[nn.Parameter]]:
    """Return unsharded parameters by module, including `expert_names` and parameters in several modules."""
    module_counts = Counter(name for module in modules for name, _ in module.named_parameters())
    names = {name for name in module_counts if module_counts[name] > 1} | expert_names
    return [_select_unsharded_parameters(module, precision, names) for module in modules]


def _select_unsharded_parameters(module: nn.Module, precision: Precision, names: Set[str]) -> set[nn.Parameter]:
    """
    Return a module's unsharded parameters.

    These are: the named ones, adapters', the loss's, integers, scalars, and parameters in another dtype than `compute`.
    """
    adapters = adapter_parameter_names(module)
    return {
        parameter
        for name, parameter in module.named_parameters()
        if name in names
        or name in adapters
        or name.startswith(f"{LOSS}.")
        or not parameter.is_floating_point()
        or parameter.ndim == 0
        or choose_layer_dtype(name, precision) != precision.compute
    }
