"""
FSDP: every rank keeps a slice of every parameter, and gathers a block's parameters to compute with it (ZeRO-3).

torch's `fully_shard` (FSDP2) does the work: Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277. Its hooks assume one
forward and one backward at a time. A pipeline's program has several microbatches in flight and may split a backward
pass, so the program announces when gradients are final; until then every rank accumulates its own, as without shards.
Only this file and shard_transfers.py use private names from torch's FSDP2 (tried on 2.11, 2.13 and 2.14).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.dimension import Dimension, RankParameters, StageNodes
from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.parallel.master_weights import Blocks, ParameterStore, choose_layer_dtype
from drawloom.components.parallel.shard_transfers import (
    DirectAllGather,
    DirectReduceScatter,
    Float8AllGather,
    choose_gradient_message_dtype,
)
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import HeadLayer, LinearLayer
from drawloom.components.ports.slices import TensorSlice, is_dtensor
from drawloom.components.ports.stages import LOSS, ReductionUnit
from drawloom.components.weights.adapted import adapter_parameter_names
from drawloom.graph import Problem


@attrs.define(eq=False)
class DataShardDimension(Dimension):
    """Ranks with a slice of every parameter (FSDP, ZeRO-3); ranks along `context` shard parameters, too."""

    name: ClassVar[str] = "data_shard"
    can_capture: ClassVar[bool] = False

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem for a gradient dtype that FSDP can't keep: gradients have the parameters' dtype."""
        if nodes.precision is None or nodes.sizes.data_shard * nodes.sizes.context == 1:
            return
        dtype, grad_dtype = nodes.precision.settings["parameter"], nodes.precision.settings["gradient"]
        if grad_dtype is not None and grad_dtype != dtype:
            text = (
                f"gradients of sharded parameters are kept in the parameters' dtype, {dtype!r}, and not in "
                f"{grad_dtype!r}"
            )
            yield nodes.precision.problem("gradient", text, f"write parameter = {grad_dtype!r}, or leave gradient out")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        sizes = nodes.sizes
        if (ranks := sizes.data_shard * sizes.context) > 1:
            gathers_per_block = should_gather_per_block(nodes.stages.settings["reshard_after_forward"], sizes.pipeline)
            frequency = "by layer" if gathers_per_block else "once a step"
            yield f"parameters, gradients and moments: sharded over {ranks} ranks; weights are gathered {frequency}"

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        """Return the unsharded parameters, such as the loss's, without experts; none on the first rank, their owner."""
        if not self.mesh.shard_group.rank:
            return frozenset()
        return parameters.trained.keys() - parameters.sharded - parameters.experts


def should_gather_per_block(setting: bool | None, pipeline_ranks: int) -> bool:
    """Return whether layers are gathered when they are used, by the setting and the number of pipeline ranks."""
    # In a pipeline, each microbatch would gather each block anew; so the whole stage is gathered once a step.
    return pipeline_ranks == 1 if setting is None else setting


@attrs.frozen(eq=False)
class ShardedModule:
    """
    A stage's module with sharded parameters (FSDP).

    FSDP units are: the module, for parameters outside all other units; an untied head, which is gathered while the last
    block computes and whose gradient is reduced first; every block; and in a block its experts, if they are sharded
    over other ranks than the rest.

    With `gathers_per_block`, a block is gathered when it is used and freed afterwards, in forward and backward.
    Otherwise the program gathers the whole stage before its first use in a step, and frees it when it reduces the
    gradients. With `reduces_per_microbatch`, gradients are reduced after every microbatch, so only one microbatch's
    gradients are unsharded.
    """

    root: Any
    heads: Sequence[Any]
    blocks: Sequence[Sequence[Any]]
    gathers_per_block: bool
    reduces_per_microbatch: bool = False

    @classmethod
    def shard(
        cls,
        module: nn.Module,
        blocks: Blocks,
        unsharded: set[nn.Parameter],
        *,
        mesh: Any,
        expert_mesh: Any,
        policy: Any,
        gathers_per_block: bool,
        reduces_per_microbatch: bool,
        gathers_float8: bool,
    ) -> "ShardedModule":
        """
        Shard a module on the meta device, except for the parameters in `unsharded`.

        Experts are sharded over `expert_mesh`, if there is one. If `gathers_float8`, weights of layers that multiply in
        float8 are gathered in float8.
        """
        # Imported here, because the import takes a second, which runs without shards need not spend.
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        inner: list[list[Any]] = [
            [block, *(_find_expert_modules(block) if expert_mesh is not None else [])] for block in blocks(module)
        ]
        heads = find_untied_heads(module)
        # A parameter belongs to the innermost unit around it, which must be sharded first.
        for unit in reversed([module, *heads, *chain(*inner)]):
            # Parameters outside of blocks are used first and last: freeing them in between would save nothing.
            reshards = gathers_per_block and unit is not module and unit not in heads
            fully_shard(
                unit,
                mesh=expert_mesh if isinstance(unit, ExpertParallel) else mesh,
                reshard_after_forward=reshards,
                mp_policy=policy,
                ignored_params=unsharded,
            )
            sharded: Any = unit
            # Sums instead of means: the loss is divided by the weight of all tokens, once. gloo has no scaled sum.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_reduce_scatter(DirectReduceScatter())
            if gathers_float8 and any(_list_float8_row_widths(sharded)):
                sharded.set_custom_all_gather(Float8AllGather(partial(_list_float8_row_widths, sharded)))
            elif not gathers_per_block:
                sharded.set_custom_all_gather(DirectAllGather(partial(_allocate_gathered_tensors, sharded)))
            # Otherwise ranks would deadlock if different weights get no gradient on them (not in torch 2.11).
            if hasattr(sharded, "set_reduce_scatter_unused_params"):
                sharded.set_reduce_scatter_unused_params(True)
        for head in heads:
            register_fsdp_forward_method(head, "finish_with_head")
        for index, (block, *experts) in enumerate(inner):
            prefetched = [*experts, *(heads if index == len(inner) - 1 else [])]
            if prefetched:  # gathered while the block, or its attention, computes
                block.set_modules_to_forward_prefetch(prefetched)
        return cls(module, heads, inner, gathers_per_block, reduces_per_microbatch)

    @property
    def units(self) -> list[Any]:
        """Modules gathered and reduced one by one, outer ones before inner ones."""
        return [self.root, *self.heads, *chain(*self.blocks)]

    def initialize_fsdp_buffers(self, gradient_dtype: torch.dtype) -> None:
        """Allocate torch's buffers before the first use; gradients are accumulated in `gradient_dtype`."""
        for group in chain(*map(_get_fsdp_param_groups, self.units)):
            group.lazy_init()
            for param in group.fsdp_params:
                # A first use in inference mode would make parameters that can't be trained. Nothing is gathered here,
                # because that would take the memory of a whole unit, twice, on each rank.
                inputs = param.all_gather_inputs
                sizes, dtypes = [tensor.numel() for tensor in inputs], [tensor.dtype for tensor in inputs]
                param.init_all_gather_outputs(sizes, dtypes, group._all_gather_process_group.size(), group.device)
                param.init_unsharded_param()
                if param.sharded_param.requires_grad:
                    param.unsharded_param.grad_dtype = gradient_dtype
                param.free_unsharded_param()

    def drop_gathered_and_delay_reduction(self) -> None:
        """Drop parameters gathered from old slices; reduce gradients only after `reduce_in_next_backward`."""
        self.reshard()
        self._set_gradient_reduction(False)

    def start_unshard(self) -> None:
        """Start to gather the whole stage in order; a part of the forward pass waits for its own parameters."""
        for unit in (self.root, *chain(*self.blocks), *self.heads):
            unit.unshard(async_op=True)

    def reshard(self) -> None:
        for unit in self.units:
            for group in _get_fsdp_param_groups(unit):
                # Otherwise torch would use unused gathered parameters, of an evaluation without a layer, in a later
                # step.
                group.wait_for_unshard()
            unit.reshard()

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """
        Reduce gradients block by block, as soon as the next backward pass has computed them.

        The reduced gradients are added to the slices' gradients. Before the step's last reduction (`is_last_in_step`),
        they are not summed over replicas, and the stage's gathered parameters stay.
        """
        self._set_gradient_reduction(True, is_last_in_step)

    def stop_reducing_in_backward(self) -> None:
        """Accumulate gradients on this rank again, in case another pass follows in the step."""
        if self.reduces_per_microbatch:
            self._set_gradient_reduction(False)

    def list_reduction_units(self) -> list[ReductionUnit]:
        """Return the units, for a pass with weight gradients alone, which runs no torch hooks."""
        # Heads first, because they are large; the root last, because the embedding's gradient is last.
        ordered = (*self.heads, *reversed([*chain(*self.blocks)]), self.root)
        return [
            ReductionUnit(
                {id(param.unsharded_param) for param in _iterate_fsdp_params(unit)},
                partial(_reduce_unit_gradients, unit),
            )
            for unit in ordered
        ]

    def reduce_remaining_gradients(self) -> None:
        """End all units' reductions."""
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def peak_gathered_bytes(self) -> int:
        """Return the most bytes gathered at one time; among blocks, the one in use and the next."""
        block_bytes = [sum(map(_count_gathered_bytes, units)) for units in self.blocks]
        other_bytes = sum(map(_count_gathered_bytes, (self.root, *self.heads)))
        return other_bytes + (2 * max(block_bytes, default=0) if self.gathers_per_block else sum(block_bytes))

    def iterate_sharded_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and sharded parameters (DTensors), while they are not gathered."""
        for name, parameter in self.root.named_parameters():
            if is_dtensor(parameter):
                yield name, parameter

    def _set_gradient_reduction(self, reduces_now: bool, is_last_in_step: bool = True) -> None:
        """Set whether the next backward passes reduce gradients, and whether they end the step's reduction."""
        self.root.set_is_last_backward(reduces_now and is_last_in_step)
        for unit in self.units:  # without `recurse`, which walks through all modules
            unit.set_requires_gradient_sync(reduces_now, recurse=False)
            unit.set_requires_all_reduce(reduces_now and is_last_in_step, recurse=False)
            frees = (reduces_now and is_last_in_step) or (
                self.gathers_per_block and unit is not self.root and unit not in self.heads
            )
            unit.set_reshard_after_backward(frees, recurse=False)


@attrs.define(eq=False)
class ShardedStore:
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
    _pairs: Sequence[tuple[nn.Parameter, Any]]
    _gathered_at: list[int] = attrs.field(factory=list)

    @classmethod
    def from_modules(cls, modules: Sequence[ShardedModule], precision: Precision) -> "ShardedStore":
        """Take over sharded modules whose parameters have memory and values."""
        whole = ParameterStore.from_modules((module.root for module in modules), precision)
        masters, slices, pairs = dict(whole.masters), dict[str, TensorSlice](), []
        for module in modules:
            module.initialize_fsdp_buffers(precision.gradient)
            for name, parameter in module.iterate_sharded_parameters():
                # A plain parameter that shares the memory of torch's DTensor, so that optimizers, clippers and stagers
                # need not know about shards.
                masters[name] = nn.Parameter(get_local_slice(parameter), parameter.requires_grad)
                slices[name] = get_tensor_slice(parameter)
                pairs.append((masters[name], parameter))
        return cls(modules, masters, slices, whole, pairs)

    def cast_masters_to_copies(self, only_if_changed: bool = False) -> None:
        """
        Begin a step: cast the unsharded parameters, and drop gathered ones, which would be old.

        With `only_if_changed`, only if a parameter may have changed.
        """
        self._whole.cast_masters_to_copies(only_if_changed)
        versions = [master._version for master, _ in self._pairs]
        if not (only_if_changed and versions == self._gathered_at):
            for module in self.modules:
                module.drop_gathered_and_delay_reduction()
        self._gathered_at = versions

    def move_gradients_to_masters(self) -> None:
        """Move the reduced gradients to the slices."""
        self._whole.move_gradients_to_masters()
        for master, parameter in self._pairs:
            if parameter.grad is not None:
                gradient, parameter.grad = get_local_slice(parameter.grad), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
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
        return next(sharded for sharded in self.modules if sharded.root is module)

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
    Shard meta modules over the ranks of a torch mesh.

    A two-dimensional mesh has replicas along the first dimension (HSDP); gradient slices are summed over them, too.
    `experts` are expert ranks' slices: they are sharded over `expert_mesh`, or not at all.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    modules = list(modules)
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute,
        reduce_dtype=choose_gradient_message_dtype(precision, replicas=mesh.ndim > 1),
        # Layers cast the inputs of products; positions and weights of tokens must keep their dtype.
        cast_forward_inputs=False,
    )
    whole_by_module = find_unsharded_parameters(modules, precision, experts if expert_mesh is None else frozenset())
    return [
        ShardedModule.shard(
            module,
            blocks,
            whole,
            mesh=mesh,
            expert_mesh=expert_mesh,
            policy=policy,
            gathers_per_block=gathers_per_block,
            reduces_per_microbatch=reduces_per_microbatch,
            gathers_float8=precision.gather == "float8",
        )
        for module, whole in zip(modules, whole_by_module, strict=True)
    ]


def find_untied_heads(module: nn.Module) -> list[nn.Module]:
    """Return a stage's layers that consist of an untied head."""
    return [part for part in module.children() if isinstance(part, HeadLayer)]


def _find_expert_modules(block: nn.Module) -> list[nn.Module]:
    """Return the modules with experts inside a block."""
    return [part for part in block.modules() if isinstance(part, ExpertParallel)]


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


def _get_fsdp_param_groups(unit: Any) -> list[Any]:
    """Return a unit's FSDP parameter groups: none if it has no parameters of its own; one in torch 2.11."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reduce_unit_gradients(unit: Any) -> None:
    """Reduce a unit's gradients now, as torch's hook after a backward pass does."""
    for group in _get_fsdp_param_groups(unit):
        group.post_backward()


def _iterate_fsdp_params(unit: Any) -> Iterator[Any]:
    """Yield a unit's FSDP parameters."""
    for group in _get_fsdp_param_groups(unit):
        yield from group.fsdp_params


def _list_float8_row_widths(unit: Any) -> list[int]:
    """Return row widths for a unit's weights in float8 layers, and 0 for other parameters."""
    return [_get_float8_row_width(param) for param in _iterate_fsdp_params(unit)]


def _get_float8_row_width(param: Any) -> int:
    """Return a weight's row width if its layer multiplies in float8, else 0."""
    owner = param._module_info
    layer = owner.module
    in_float8 = isinstance(layer, LinearLayer) and layer.uses_float8 and owner.param_name == "weight"
    return int(param._orig_size[1]) if in_float8 and not layer.weight_formats else 0


def _allocate_gathered_tensors(unit: Any) -> list[Tensor]:
    """Allocate and return tensors for a unit's gathered parameters, (ranks * n,) for slices (n,)."""
    params = [*_iterate_fsdp_params(unit)]
    for param in params:
        param.alloc_all_gather_outputs()
    return [param.all_gather_outputs[0] for param in params]


def _count_gathered_bytes(unit: Any) -> int:
    """Return a unit's bytes while its parameters are gathered."""
    sizes: list[int] = [param.unsharded_param.nbytes for param in _iterate_fsdp_params(unit)]
    return sum(sizes)


def get_local_slice(tensor: Any) -> Tensor:
    """Return this rank's slice of a DTensor (any shape), sharing its memory, without a graph."""
    with torch.no_grad():
        part: Tensor = tensor.to_local().detach()
    return part


def get_tensor_slice(tensor: Any) -> TensorSlice:
    """Return this rank's slice position in a DTensor (any shape)."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorSlice(tuple(tensor.shape), tuple(offsets), tuple(size))
