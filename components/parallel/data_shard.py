"""
Parameters that FSDP2 shards over ranks: every rank keeps a slice of each, and gathers a block's to compute with it.

torch's `fully_shard` does the work: Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277. Its hooks assume one forward
and one backward at a time. A pipeline's program has several microbatches in flight and may split a backward pass, so
that the program says here when gradients are final; until then each rank adds up its own, as without shards. This file
and shard_transfers.py alone use private names of torch's FSDP2 (tried on 2.11, 2.13 and 2.14).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.dimension import Dimension, SharedParameters, StageNodes
from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.parallel.master_weights import Blocks, ParameterStore, compute_dtype
from drawloom.components.parallel.shard_transfers import DirectAllGather, DirectReduceScatter, sent_dtype
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import HeadLayer
from drawloom.components.ports.slices import TensorSlice, is_dtensor
from drawloom.components.ports.stages import LOSS, ReducedPart
from drawloom.components.weights.adapted import adapter_names
from drawloom.graph import Problem


@attrs.define(eq=False)
class DataShardDimension(Dimension):
    """Ranks that each hold a slice of every parameter (FSDP, ZeRO-3); those along `context` share in it."""

    name: ClassVar[str] = "data_shard"
    can_capture: ClassVar[bool] = False

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems of dtypes: FSDP keeps the slices of gradients in the dtype of parameters."""
        if nodes.precision is None or nodes.sizes.data_shard * nodes.sizes.context == 1:
            return
        kept, summed = nodes.precision.settings["parameter"], nodes.precision.settings["gradient"]
        if summed is not None and summed != kept:
            text = f"gradients of sharded parameters are kept in the parameters' dtype, {kept!r}, and not in {summed!r}"
            yield nodes.precision.problem("gradient", text, f"write parameter = {summed!r}, or leave gradient out")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        sizes = nodes.sizes
        if (ranks := sizes.data_shard * sizes.context) > 1:
            by_block = gathers_by_block(nodes.stages.settings["reshard_after_forward"], sizes.pipeline)
            often = "by layer" if by_block else "once a step"
            yield f"parameters, gradients and moments: sharded over {ranks} ranks; weights are gathered {often}"

    def owned_elsewhere(self, parameters: SharedParameters) -> Set[str]:
        """Return the parameters that are whole on each rank, such as the loss's."""
        if not self.mesh.shard_group.rank:
            return frozenset()
        return parameters.trained.keys() - parameters.sharded - parameters.experts


def gathers_by_block(setting: bool | None, pipeline: int) -> bool:
    """Return whether each layer is gathered when it is used, with that many pipeline ranks."""
    # Each microbatch of a pipeline would gather each block anew, so that a stage is gathered once a step there.
    return pipeline == 1 if setting is None else setting


@attrs.frozen(eq=False)
class ShardedModule:
    """
    A stage's module whose parameters are sharded.

    Units of FSDP are the module, for what no other one holds; a head that is not tied, so that it is gathered while the
    last block computes, and its gradient is reduced first; and in each block the block and, where other ranks have
    their slices than those of the rest, its experts.
    `by_block` gathers each block when it is used and frees it afterwards, in forward and backward. Otherwise the
    program gathers the whole stage before its first use in a step, and its gradients' reduction frees it.
    `by_microbatch` reduces gradients after each microbatch, so that no more than those of one are unsharded.
    """

    root: Any
    heads: Sequence[Any]
    blocks: Sequence[Sequence[Any]]
    by_block: bool
    by_microbatch: bool = False

    @classmethod
    def of(
        cls, module: nn.Module, blocks: Blocks, whole: set[nn.Parameter], expert_mesh: Any = None, **how: Any
    ) -> "ShardedModule":
        """
        Shard a module on the meta device, except for the parameters `whole`; `how` is for `fully_shard`.

        Experts are sharded over a mesh of their own if there is one.
        """
        # Takes a second to import, which runs without shards do not pay.
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        by_block, by_microbatch = how["reshard_after_forward"], how.pop("by_microbatch")
        inner: list[list[Any]] = [
            [block, *(_experts(block) if expert_mesh is not None else [])] for block in blocks(module)
        ]
        heads = heads_of(module)
        # A parameter belongs to the innermost unit around it, which must be sharded first.
        for unit in reversed([module, *heads, *chain(*inner)]):
            # What no block holds is used first and last, so that freeing it in between would save nothing.
            changed = {"reshard_after_forward": False} if unit is module or unit in heads else {}
            if isinstance(unit, ExpertParallel):
                changed["mesh"] = expert_mesh
            fully_shard(unit, ignored_params=whole, **(how | changed))
            sharded: Any = unit
            # Sums, because a loss is divided by the weight of all tokens, once. gloo has no scaled sum.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_reduce_scatter(DirectReduceScatter())
            if not by_block:
                sharded.set_custom_all_gather(DirectAllGather(partial(_outputs, sharded)))
            # Else ranks on which different weights get no gradient would wait for each other (not in torch 2.11).
            if hasattr(sharded, "set_reduce_scatter_unused_params"):
                sharded.set_reduce_scatter_unused_params(True)
        for head in heads:
            register_fsdp_forward_method(head, "finish")
        for number, (block, *experts) in enumerate(inner):
            later = [*experts, *(heads if number == len(inner) - 1 else [])]
            if later:  # gathered while the block, or its attention, computes
                block.set_modules_to_forward_prefetch(later)
        return cls(module, heads, inner, by_block, by_microbatch)

    @property
    def units(self) -> list[Any]:
        """Modules that torch gathers and reduces one by one, outer ones before inner ones."""
        return [self.root, *self.heads, *chain(*self.blocks)]

    def open(self, gradient: torch.dtype) -> None:
        """Make what torch makes at the first use; microbatches are summed in dtype `gradient`."""
        for group in chain(*map(_groups, self.units)):
            group.lazy_init()
            for part in group.fsdp_params:
                # In inference mode, a first use would make parameters that can't be trained. Nothing is gathered: that
                # would take the memory of a whole unit, twice, on each rank.
                inputs = part.all_gather_inputs
                sizes, dtypes = [each.numel() for each in inputs], [each.dtype for each in inputs]
                part.init_all_gather_outputs(sizes, dtypes, group._all_gather_process_group.size(), group.device)
                part.init_unsharded_param()
                if part.sharded_param.requires_grad:
                    part.unsharded_param.grad_dtype = gradient
                part.free_unsharded_param()

    def begin(self) -> None:
        """Begin a step: the slices have changed, and no gradient is final before `reduce_next`."""
        self.reshard()
        self._reduce_in_backward(False)

    def unshard(self) -> None:
        """Start to gather the whole stage, in the order of use; each part of the forward waits for its own."""
        for unit in (self.root, *chain(*self.blocks), *self.heads):
            unit.unshard(async_op=True)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self.units:
            for group in _groups(unit):
                # torch would take what was gathered and not used, by an evaluation without a layer, for a later step's.
                group.wait_for_unshard()
            unit.reshard()

    def reduce_next(self, final: bool) -> None:
        """
        With the next backward pass each block's gradients are reduced as soon as they are computed.

        They are added to those of the slices. Unless they are `final`, replicas are not summed over, and nothing that
        was gathered for the stage is freed.
        """
        self._reduce_in_backward(True, final)

    def reduced(self) -> None:
        """Add up gradients on this rank again, which matters if another pass follows in the step."""
        if self.by_microbatch:
            self._reduce_in_backward(False)

    def parts(self) -> list[ReducedPart]:
        """The units, for a pass for the weights alone, which runs no hook of torch's."""
        # Heads first, which are large; what belongs to no block last, as the embedding's gradient is.
        ordered = (*self.heads, *reversed([*chain(*self.blocks)]), self.root)
        weights = [{id(part.unsharded_param) for part in _parts(unit)} for unit in ordered]
        return [ReducedPart(each, partial(_reduce, unit)) for each, unit in zip(weights, ordered, strict=True)]

    def reduce(self) -> None:
        """End a reduction of all parts."""
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def gathered_bytes(self) -> int:
        """The most bytes that are gathered at one time; of blocks the one in use and the next."""
        of_blocks = [sum(map(_gathered_bytes, units)) for units in self.blocks]
        ends = sum(map(_gathered_bytes, (self.root, *self.heads)))
        return ends + (2 * max(of_blocks, default=0) if self.by_block else sum(of_blocks))

    def sharded(self) -> Iterator[tuple[str, Any]]:
        """The sharded parameters (DTensors) by name, while they are not gathered."""
        for name, parameter in self.root.named_parameters():
            if is_dtensor(parameter):
                yield name, parameter

    def _reduce_in_backward(self, now: bool, final: bool = True) -> None:
        self.root.set_is_last_backward(now and final)
        for unit in self.units:  # without `recurse`, which walks through all modules
            unit.set_requires_gradient_sync(now, recurse=False)
            unit.set_requires_all_reduce(now and final, recurse=False)
            frees = (now and final) or (self.by_block and unit is not self.root and unit not in self.heads)
            unit.set_reshard_after_backward(frees, recurse=False)


@attrs.define(eq=False)
class ShardedStore:
    """
    The parameters of modules on one rank, sharded over ranks; `masters` are this rank's slices, as plain parameters.

    `slices` says which part of the whole parameter each is. Those without an entry are whole on every rank: parameters
    of a loss and of adapters, those that are not cast, since FSDP gathers one dtype at a time, and those that two local
    stages share.
    """

    modules: Sequence[ShardedModule]
    masters: dict[str, nn.Parameter]
    slices: Mapping[str, TensorSlice]
    _whole: ParameterStore
    _pairs: Sequence[tuple[nn.Parameter, Any]]
    _gathered_at: list[int] = attrs.field(factory=list)

    @classmethod
    def of(cls, modules: Sequence[ShardedModule], precision: Precision) -> "ShardedStore":
        """Take over sharded modules whose parameters have memory and values."""
        whole = ParameterStore.of((module.root for module in modules), precision)
        masters, slices, pairs = dict(whole.masters), dict[str, TensorSlice](), []
        for module in modules:
            module.open(precision.gradient)
            for name, parameter in module.sharded():
                # Memory that is shared with torch's parameter, without its class: optimizers, clippers and stagers
                # need to know nothing of shards.
                masters[name] = nn.Parameter(local_part(parameter), parameter.requires_grad)
                slices[name] = slice_of(parameter)
                pairs.append((masters[name], parameter))
        return cls(modules, masters, slices, whole, pairs)

    def cast(self, only_if_changed: bool = False) -> None:
        """Begin a step: what was gathered is dropped; `only_if_changed`, if a slice may have changed since."""
        self._whole.cast(only_if_changed)
        versions = [master._version for master, _ in self._pairs]
        if not (only_if_changed and versions == self._gathered_at):
            for module in self.modules:
                module.begin()
        self._gathered_at = versions

    def hand_over_gradients(self) -> None:
        """Make the reduced gradients those of the slices."""
        self._whole.hand_over_gradients()
        for master, parameter in self._pairs:
            if parameter.grad is not None:
                gradient, parameter.grad = local_part(parameter.grad), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        # Fused optimizers change parameters without a change of their versions.
        self._gathered_at = []

    def held_bytes(self, tensor: Tensor) -> int:
        """Bytes of this rank's slice of a tensor of any shape."""
        return local_part(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes

    @property
    def summed(self) -> Set[str]:
        """The parameters whose gradients backward passes reduce."""
        return self.slices.keys()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the compute copies among the parameters of the modules."""
        return self._whole.copied_bytes

    def shards_of(self, module: nn.Module) -> ShardedModule:
        """The shards of one of the modules."""
        return next(each for each in self.modules if each.root is module)

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of masters that have copies, and of these copies and what is gathered at one time."""
        whole = self._whole.memory_bytes()
        gathered = sum(module.gathered_bytes() for module in self.modules)
        return {**whole, "compute_copies": whole["compute_copies"] + gathered}


def shard(
    modules: Iterable[nn.Module],
    blocks: Blocks,
    mesh: Any,
    precision: Precision,
    by_block: bool,
    by_microbatch: bool = False,
    of_experts: Set[str] = frozenset(),
    expert_mesh: Any = None,
) -> list[ShardedModule]:
    """
    Shard modules that are on the meta device over the ranks of a torch mesh.

    A mesh of two dimensions has replicas along the first, over which slices of gradients are summed, too. Of the
    parameters `of_experts` expert ranks have slices: they are sharded over a mesh of their own, or not at all.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    modules, sent = list(modules), sent_dtype(precision, replicas=mesh.ndim > 1)
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute,
        reduce_dtype=sent,
        # Layers cast what they multiply; positions and weights of tokens keep their dtype.
        cast_forward_inputs=False,
    )
    whole = whole_parameters(modules, precision, of_experts if expert_mesh is None else frozenset())
    how = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": by_block, "expert_mesh": expert_mesh}
    how["by_microbatch"] = by_microbatch
    return [ShardedModule.of(module, blocks, kept, **how) for module, kept in zip(modules, whole, strict=True)]


def heads_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a stage that are its head alone: none of one that is tied to the embedding."""
    return [part for part in module.children() if isinstance(part, HeadLayer)]


def _experts(block: nn.Module) -> list[nn.Module]:
    return [part for part in block.modules() if isinstance(part, ExpertParallel)]


def whole_parameters(
    modules: Sequence[nn.Module], precision: Precision, of_experts: Set[str]
) -> list[set[nn.Parameter]]:
    """By module, the parameters that are not sharded: those `of_experts`, and those that several modules have, too."""
    times = Counter(name for module in modules for name, _ in module.named_parameters())
    apart = {name for name in times if times[name] > 1} | of_experts
    return [_whole(module, precision, apart) for module in modules]


def _whole(module: nn.Module, precision: Precision, apart: Set[str]) -> set[nn.Parameter]:
    """The parameters of a module that are not sharded: those named, and others; adapters' are small."""
    adapters = adapter_names(module)
    return {
        parameter
        for name, parameter in module.named_parameters()
        if name in apart
        or name in adapters
        or name.startswith(f"{LOSS}.")
        or not parameter.is_floating_point()
        or parameter.ndim == 0
        or compute_dtype(name, precision) != precision.compute
    }


def _groups(unit: Any) -> list[Any]:
    """The parameter groups of a unit: none if it has no parameters of its own; one in torch 2.11."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reduce(unit: Any) -> None:
    for group in _groups(unit):
        group.post_backward()


def _parts(unit: Any) -> Iterator[Any]:
    for group in _groups(unit):
        yield from group.fsdp_params


def _outputs(unit: Any) -> list[Tensor]:
    """What a unit's parameters are gathered into, each (ranks * n,) of this rank's (n,), with memory."""
    parts = [*_parts(unit)]
    for part in parts:
        part.alloc_all_gather_outputs()
    return [part.all_gather_outputs[0] for part in parts]


def _gathered_bytes(unit: Any) -> int:
    sizes: list[int] = [part.unsharded_param.nbytes for part in _parts(unit)]
    return sum(sizes)


def local_part(tensor: Any) -> Tensor:
    """This rank's slice of a DTensor of any shape, sharing its memory, without a graph."""
    with torch.no_grad():
        part: Tensor = tensor.to_local().detach()
    return part


def slice_of(tensor: Any) -> TensorSlice:
    """Where this rank's slice of a DTensor of any shape lies in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorSlice(tuple(tensor.shape), tuple(offsets), tuple(size))
